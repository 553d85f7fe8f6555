"""Up to how many rows reading codes is faster than expanding them: measured once for each shape, and kept.

A kernel that reads codes takes time in proportion to the rows, expanding takes most of its own at one row already. So
rows are doubled until expanding wins. What was found lies in the cache, by processor, torch, threads and shape: other
machines, and other numbers of threads, find their own.
"""

import json
import time
from pathlib import Path

import torch

from compress.evaluation.memory import cpu_name
from compress.files import replace
from compress.paths import cache_dir
from compress.runtimes.kernels import Product

MOST = 256  # rows; where reading codes still wins, it always does
_TRIES = 3


def crossover(few: Product, many: Product, what: tuple[str, int, int, int]) -> int:
    """The most rows for which `few` is used; 1 to `MOST`.

    Args:
        what: name of the line of the table, outputs, inputs, and the group size.
    """
    key = "/".join(map(str, (cpu_name(), torch.__version__, torch.get_num_threads(), *what)))
    file = cache_dir() / "crossovers.json"
    known = _read(file)
    if key not in known:
        known = {**_read(file), key: _measure(few, many, what[2])}
        _keep(file, known)
    return known[key]


def _measure(few: Product, many: Product, in_features: int) -> int:
    rows, within = 2, 1
    while rows <= MOST:
        x_NI = torch.ones(rows, in_features, dtype=torch.bfloat16)
        if _seconds(many, x_NI) <= _seconds(few, x_NI):
            break
        within, rows = rows, rows * 2
    return within


def _seconds(product: Product, x_NI: torch.Tensor) -> float:
    """The shortest of some tries."""
    taken = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        product(x_NI)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _read(file: Path) -> dict[str, int]:
    """What is kept; nothing where it cannot be read."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in kept.items() if isinstance(v, int)} if isinstance(kept, dict) else {}


def _keep(file: Path, known: dict[str, int]) -> None:
    """Writes it, where the cache can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, json.dumps(known, indent=1).encode(), shared=True)
    except OSError:
        return  # it is measured again next time
