"""Fidelity of an artifact against its base, in a process of its own: neither model is ever whole in memory.

As a program it reads a request as JSON on stdin, writes progress ("done total") on stderr and the rows as JSON
on the last line of stdout.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress.artifact import open_artifact
from compress.calibration.walk import return_large_blocks
from compress.errors import CompressError
from compress.evaluation.fidelity import compare_hidden, fidelity_rows
from compress.evaluation.metrics import Row
from compress.evaluation.stream import stream


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
        "base": str(base), "artifact": str(artifact), "tokens": tokens, "task": task, "conditions": conditions,
        "threads": threads,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "compress.evaluation.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[2],
    ) as worker:  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdin.write(json.dumps(request))
        worker.stdin.close()
        said: list[str] = []
        for line in worker.stderr:
            done, _, total = line.strip().partition(" ")
            if done.isdecimal() and total.isdecimal():
                progress(int(done), int(total))
            else:
                said.append(line.rstrip())
        output = worker.stdout.read()
    if worker.returncode != 0:
        raise CompressError("the fidelity measurement died: " + " | ".join(said[-4:]), where=str(artifact))
    rows: list[Row] = json.loads(output.strip().rsplit("\n", 1)[-1])
    return rows


def main() -> int:
    """The worker."""
    return_large_blocks()
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    tokens_NT = torch.tensor(request["tokens"])
    base, artifact = open_artifact(Path(request["base"])), open_artifact(Path(request["artifact"]))
    total = base.block_count + artifact.block_count

    def tell(done: int) -> None:
        sys.stderr.write(f"{done} {total}\n")
        sys.stderr.flush()

    base_NTD = stream(base, tokens_NT, progress=lambda done, _: tell(done))
    artifact_NTD = stream(artifact, tokens_NT, progress=lambda done, _: tell(base.block_count + done))
    found = compare_hidden(
        (base.head(), artifact.head()), lambda n: (base_NTD[n : n + 1], artifact_NTD[n : n + 1]), tokens_NT
    )
    rows = fidelity_rows(found, request["task"], request["conditions"])
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
