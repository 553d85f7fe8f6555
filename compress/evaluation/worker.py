"""Perplexity of a checkpoint and its fidelity to another, in a process of its own.

Models of known families go through block by block, so that neither is ever whole in memory. Others, and formats
that only transformers reads, are loaded whole by transformers; the rows' conditions say which it was.

A base is asked the same for every artifact: its last hidden states are kept, float32, four bytes for each hidden
channel of a token where logits would take as many for each word. Pushed through its head again they give the same
logits to the last bit, so nothing is cut off. Beside them are those of its noise floor.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.artifact import open_artifact
from compress.errors import CompressError
from compress.evaluation.fidelity import (
    Head,
    by_position,
    compare_hidden,
    fidelity_rows,
    floor_row,
    next_token_nll,
    perplexity_row,
)
from compress.evaluation.memory import return_large_blocks
from compress.evaluation.metrics import Row
from compress.evaluation.stream import stream
from compress.runtimes.hf import HfRuntime
from compress.shards import save_tensors
from compress.workers import call, serve, tell

_FLOOR_TOKENS = 2048
Progress = Callable[[int, int], None]
Predictions = tuple[Head, Callable[[int], Tensor]]  # a head, and what it reads for a window


def measure_fidelity(
    base: Path | None,
    artifact: Path,
    tokens: list[list[int]],
    *,
    task: str,
    conditions: dict[str, Any],
    threads: int,
    kept: Path | None = None,
    progress: Progress,
) -> list[Row]:
    """Perplexity of both and the divergence between them, on windows of tokens [N, T]; without base, its own only.

    Args:
        conditions: of every row; `runtime` "stream" or "hf" says how both models are run.
        kept: a file of the base's hidden states, to be read or to be made; for the runtime "stream".
    """
    request = {
        "base": None if base is None else str(base.resolve()), "artifact": str(artifact.resolve()), "tokens": tokens,
        "task": task, "conditions": conditions, "threads": threads,
        "kept": None if kept is None else str(kept),
    }  # fmt: skip
    rows: list[Row] = call(
        "compress.evaluation.worker", request, what="measuring the fidelity", where=str(artifact), progress=progress
    )
    return rows


def streamed(folder: Path) -> bool:
    """Whether the checkpoint's family and format are read block by block."""
    try:
        open_artifact(folder)
    except CompressError:
        return False
    return True


def answer(request: dict[str, Any]) -> list[Row]:
    """The worker: the models through the same tokens, then their predictions compared."""
    return_large_blocks()
    torch.set_num_threads(request["threads"])
    tokens_NT = torch.tensor(request["tokens"])
    base_folder, folder = (None if request[name] is None else Path(request[name]) for name in ("base", "artifact"))
    assert folder is not None
    task, conditions = request["task"], request["conditions"]
    total = 1 if base_folder is None else 2
    if conditions["runtime"] == "hf":
        models = [
            _whole(f, tokens_NT, request["threads"], tells=i == 0) for i, f in enumerate((base_folder, folder)) if f
        ]
        floor: list[Row] = []
    else:
        models, floor = [_streamed(folder, tokens_NT, _share(total - 1, total))], []
        if base_folder is not None:
            base, low = _base(base_folder, tokens_NT, request["kept"], _share(0, total))
            models.insert(0, base)
            count = len(tokens_NT[: _floor_windows(tokens_NT)])
            against = compare_hidden((base[0], base[0]), lambda n: (base[1](n), low(n)), tokens_NT[:count])
            floor = [floor_row(against, task, conditions)]
    if len(models) == 1:
        nll_P = next_token_nll(*models[0], tokens_NT)
        return [perplexity_row("artifact", nll_P, task, conditions, by_position(nll_P, len(tokens_NT)))]
    (base_head, base_hidden), (head, artifact) = models
    found = compare_hidden((base_head, head), lambda n: (base_hidden(n), artifact(n)), tokens_NT)
    lost = int((~found.nll_base_P.isfinite()).sum())
    if lost:
        raise CompressError(
            f"the base gives no finite numbers at {lost:,} of {len(found.nll_base_P):,} positions",
            where=str(base_folder), hint="nothing can be compared with it: name another base, --against BASE",
        )  # fmt: skip
    return [*fidelity_rows(found, task, conditions, len(tokens_NT)), *floor]


def _share(index: int, count: int) -> Progress:
    """Tells of one model's progress as its share of all."""
    return lambda done, parts: tell(index * parts + done, count * parts)


@contextlib.contextmanager
def _weights_of(folder: Path) -> Iterator[None]:
    """Says of which checkpoint a weight is that cannot be computed with."""
    try:
        yield
    except CompressError as error:
        hint = error.hint or "the checkpoint is damaged: get it again, or leave it out"
        raise CompressError(error.what, where=f"{folder}, {error.where}", hint=hint) from error


def _streamed(folder: Path, tokens_NT: Tensor, progress: Progress) -> Predictions:
    model = open_artifact(folder)
    with _weights_of(folder):
        hidden_NTD = stream(model, tokens_NT, progress=progress)
        return model.head(), lambda n: hidden_NTD[n : n + 1]


def _floor_windows(tokens_NT: Tensor) -> int:
    """How many windows the noise floor is measured on: it needs few, and bfloat16 is slow on most CPUs."""
    return max(1, _FLOOR_TOKENS // tokens_NT.shape[1])


def _base(
    folder: Path, tokens_NT: Tensor, kept: str | None, progress: Progress
) -> tuple[Predictions, Callable[[int], Tensor]]:
    """The base, and what its noise floor reads for a window; its hidden states from `kept` where that is whole."""
    model = open_artifact(folder)
    path = None if kept is None else Path(kept)
    hidden = _read(path) if path is not None else None
    if hidden is None:
        few_nT = tokens_NT[: _floor_windows(tokens_NT)]
        with _weights_of(folder):
            hidden = {
                "hidden": stream(model, tokens_NT, progress=progress),
                "low": stream(model, few_nT, dtype=torch.bfloat16, batch=1).float(),
            }
        if path is not None:
            _keep(path, hidden)
    hidden_NTD, low_nTD = hidden["hidden"], hidden["low"]
    return (model.head(), lambda n: hidden_NTD[n : n + 1]), lambda n: low_nTD[n : n + 1]


def _read(path: Path) -> dict[str, Tensor] | None:
    """Hidden states that were kept; None where there are none, or not whole ones."""
    try:
        with safe_open(path, framework="pt", backend="pread") as file:
            return {name: file.get_tensor(name) for name in ("hidden", "low")}
    except (OSError, SafetensorError):
        return None


def _keep(path: Path, hidden: dict[str, Tensor]) -> None:
    """Keeps hidden states; a cache that cannot be written costs time, and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        save_tensors(hidden, temporary)
        temporary.replace(path)


def _whole(folder: Path, tokens_NT: Tensor, threads: int, *, tells: bool) -> Predictions:
    """The model stays loaded and computes a window's logits when they are asked for: no window's are kept."""
    runtime = HfRuntime()
    runtime.load(folder, threads=threads, dtype="float32")

    def logits(n: int) -> Tensor:
        if tells:
            tell(n, len(tokens_NT))
        return runtime.logits(tokens_NT[n : n + 1])

    return (lambda logits_1TV: logits_1TV), logits


if __name__ == "__main__":
    raise SystemExit(serve(answer))
