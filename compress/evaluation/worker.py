"""Fidelity of an artifact against its base, in a process of its own: neither model is ever whole in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress.artifact import open_artifact
from compress.evaluation.fidelity import compare_hidden, fidelity_rows
from compress.evaluation.memory import return_large_blocks
from compress.evaluation.metrics import Row
from compress.evaluation.stream import stream
from compress.workers import call, serve, tell


def measure_fidelity(
    base: Path,
    artifact: Path,
    tokens: list[list[int]],
    *,
    task: str,
    conditions: dict[str, Any],
    threads: int,
    progress: Callable[[int, int], None],
) -> list[Row]:
    """Perplexity of both and the divergence between them, on windows of tokens [N, T]."""
    request = {
        "base": str(base.resolve()), "artifact": str(artifact.resolve()), "tokens": tokens, "task": task,
        "conditions": conditions, "threads": threads,
    }  # fmt: skip
    rows: list[Row] = call(
        "compress.evaluation.worker", request, what="measuring the fidelity", where=str(artifact), progress=progress
    )
    return rows


def answer(request: dict[str, Any]) -> list[Row]:
    """The worker: both models through the same tokens, then their predictions compared."""
    return_large_blocks()
    torch.set_num_threads(request["threads"])
    tokens_NT = torch.tensor(request["tokens"])
    base, artifact = open_artifact(Path(request["base"])), open_artifact(Path(request["artifact"]))
    total = base.block_count + artifact.block_count
    base_NTD = stream(base, tokens_NT, progress=lambda done, _: tell(done, total))
    artifact_NTD = stream(artifact, tokens_NT, progress=lambda done, _: tell(base.block_count + done, total))
    found = compare_hidden(
        (base.head(), artifact.head()), lambda n: (base_NTD[n : n + 1], artifact_NTD[n : n + 1]), tokens_NT
    )
    return fidelity_rows(found, request["task"], request["conditions"])


if __name__ == "__main__":
    raise SystemExit(serve(answer))
