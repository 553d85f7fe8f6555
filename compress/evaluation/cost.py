"""What a suite costs on the machine at hand, before anything is measured: tokens, and minutes roughly.

The minutes come from this machine's matrix product, timed for a moment: a forward pass takes twice the parameters
in operations for each token, at about half the product's rate; a decoding step reads every weight once.

Left out: how much slower compressed weights run; other work on the machine.
"""

import functools
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compress.evaluation.suite import Suite, load_sample, prompts_of
from compress.paths import data_dir

_SHARE = 0.5  # of the matrix product's rate that a whole forward pass reaches
_BYTES_PER_S = 8e9  # read while decoding, of the 2 bytes a weight
_REPEATS = 6  # of each speed point, with its warm-ups
_START_S = 8.0  # of a worker with its libraries
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Cost:
    """Of one suite for one model.

    Attributes:
        documents, tasks: of the accuracy part; `documents` None where all there are will be asked.
        tokens: processed of one model, without the speed measurement; None where that is not known.
        points: of the speed measurement.
        prompts: continued by each model.
        seconds: for base and artifact together, here; None where the tokens are not known.
    """

    suite: str
    documents: int | None
    tasks: int
    tokens: int | None
    text_tokens: int
    points: int
    prompts: int
    seconds: float | None

    @property
    def document(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @property
    def text(self) -> str:
        """In one sentence."""
        parts = [f"{self.text_tokens:,} tokens of text"]
        if self.tasks:
            count = "all documents" if self.documents is None else f"{self.documents:,} documents"
            parts.insert(0, f"{count} of {self.tasks} task{'s' if self.tasks > 1 else ''}")
        if self.prompts:
            parts.append(f"{self.prompts} prompt{'s' if self.prompts > 1 else ''}")
        if self.points:
            parts.append(f"{self.points} speed point{'s' if self.points > 1 else ''}")
        about = ""
        if self.seconds is not None:
            about = f"; about {max(1, round(self.seconds / 60))} min here for base and artifact"
        return f"{self.suite}: {', '.join(parts)}{about}"


def cost(suite: Suite, params: int) -> Cost:
    """What measuring a model of so many parameters, and its base, takes."""
    documents, tokens = _asked(suite)
    text = suite.text.windows * suite.text.seq_len
    prompts, written, steps = _written(suite)
    seconds = None
    if tokens is not None:
        per_token = 2 * params / (_SHARE * matmul_rate())
        timed = sum(
            _REPEATS * (p.batch * p.context * per_token + p.output * 2 * params / _BYTES_PER_S) for p in suite.speed
        )
        workers = 2 + (3 if suite.accuracy else 0) + (2 if written else 0) + (4 if suite.speed else 0)
        timed += written * per_token + steps * 4 * params / _BYTES_PER_S
        seconds = 2 * ((text + tokens) * per_token + timed) + workers * _START_S
    tasks = len(suite.accuracy.tasks) if suite.accuracy else 0
    known = None if tokens is None else text + tokens
    return Cost(suite.name, documents, tasks, known, text, len(suite.speed), prompts, seconds)


def _written(suite: Suite) -> tuple[int, int, int]:
    """Prompts, about how many tokens go through a model for them, and in how many steps."""
    if suite.generation is None:
        return 0, 0, 0
    sizes = [1 + len(text) // _BYTES_PER_TOKEN for text in prompts_of(suite).texts]
    return len(sizes), len(sizes) * (max(sizes) + suite.generation.output), max(sizes) + suite.generation.output


def _asked(suite: Suite) -> tuple[int | None, int | None]:
    """Documents of the suite's tasks, and about how many tokens; None for what is not known here."""
    if suite.accuracy is None:
        return 0, 0
    sample = load_sample(suite)
    if sample:
        return sum(len(sample.documents[task.task]) for task in suite.accuracy.tasks), sample.tokens
    texts = []
    for task in suite.accuracy.tasks:
        files = list((data_dir("eval") / "tasks" / task.task).glob("*.jsonl"))
        if not files:
            return None, None
        texts += [file.read_text(encoding="utf-8") for file in files]
    return sum(len(text.splitlines()) for text in texts), sum(map(len, texts)) // _BYTES_PER_TOKEN


@functools.cache
def matmul_rate() -> float:
    """Operations a second of this machine's float32 matrix product, timed for about a tenth of a second."""
    left, right = torch.ones(512, 1024), torch.ones(1024, 1024)
    left @ right
    start = time.perf_counter()
    count = 0
    while time.perf_counter() - start < 0.1:
        left @ right
        count += 1
    return count * 2 * 512 * 1024 * 1024 / (time.perf_counter() - start)
