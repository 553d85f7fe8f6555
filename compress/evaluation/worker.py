"""Perplexity of a checkpoint and its fidelity to another, in a process of its own.

Models of known families go through block by block, so that neither is ever whole in memory. Others, and formats
that only transformers reads, are loaded whole by transformers; the rows' conditions say which it was.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact import open_artifact
from compress.errors import CompressError
from compress.evaluation.fidelity import Head, compare_hidden, fidelity_rows, next_token_nll, perplexity_row
from compress.evaluation.memory import return_large_blocks
from compress.evaluation.metrics import Row
from compress.evaluation.stream import stream
from compress.runtimes.hf import HfRuntime
from compress.workers import call, serve, tell

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
    progress: Progress,
) -> list[Row]:
    """Perplexity of both and the divergence between them, on windows of tokens [N, T]; without base, its own only.

    Args:
        conditions: of every row; `runtime` "stream" or "hf" says how both models are run.
    """
    request = {
        "base": None if base is None else str(base.resolve()), "artifact": str(artifact.resolve()), "tokens": tokens,
        "task": task, "conditions": conditions, "threads": threads,
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
    folders = [Path(folder) for folder in (request["base"], request["artifact"]) if folder is not None]
    whole = request["conditions"]["runtime"] == "hf"
    task, conditions, total = request["task"], request["conditions"], len(folders)
    if whole:
        models = [_whole(folder, tokens_NT, request["threads"], tells=i == 0) for i, folder in enumerate(folders)]
    else:
        models = [_streamed(folder, tokens_NT, _share(i, total)) for i, folder in enumerate(folders)]
    if len(models) == 1:
        return [perplexity_row("artifact", next_token_nll(*models[0], tokens_NT), task, conditions)]
    (base_head, base), (head, artifact) = models
    found = compare_hidden((base_head, head), lambda n: (base(n), artifact(n)), tokens_NT)
    return fidelity_rows(found, task, conditions, len(tokens_NT))


def _share(index: int, count: int) -> Progress:
    """Tells of one model's progress as its share of all."""
    return lambda done, parts: tell(index * parts + done, count * parts)


def _streamed(folder: Path, tokens_NT: Tensor, progress: Progress) -> Predictions:
    model = open_artifact(folder)
    hidden_NTD = stream(model, tokens_NT, progress=progress)
    return model.head(), lambda n: hidden_NTD[n : n + 1]


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
