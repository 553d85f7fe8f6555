"""Text drawn from the model itself, for `dataset: self`, in a process of its own.

Each window starts with the tokenizer's first token and is sampled token by token from the model's own
distribution (temperature 1), with a private seeded generator.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.runtimes.hf import HfRuntime

_BATCH = 16


def draw(folder: Path, first_token: int, windows: int, seq_len: int, seed: int, threads: int) -> Tensor:
    """int64 [windows, seq_len] sampled from the checkpoint in `folder`."""
    request = {
        "folder": str(folder), "first": first_token, "windows": windows, "seq_len": seq_len, "seed": seed,
        "threads": threads,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "compress.runtimes.draw"],
        input=json.dumps(request), capture_output=True, text=True, check=False,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    if done.returncode != 0:
        raise CompressError("drawing text from the model failed: " + done.stderr.strip()[-500:], where=str(folder))
    return torch.tensor(json.loads(done.stdout.strip().rsplit("\n", 1)[-1]))


def sample(runtime: HfRuntime, first_token: int, windows: int, seq_len: int, seed: int) -> Tensor:
    """int64 [windows, seq_len]; see the module."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, windows, _BATCH):
        token_B1 = torch.full((min(_BATCH, windows - start), 1), first_token)
        chosen = [token_B1]
        logits_BV = runtime.prefill(token_B1)
        for _ in range(seq_len - 1):
            token_B1 = torch.multinomial(logits_BV.float().softmax(-1), 1, generator=generator)
            chosen.append(token_B1)
            logits_BV = runtime.extend(token_B1)
        rows.append(torch.cat(chosen, dim=1))
    return torch.cat(rows)


def main() -> int:
    """The worker: a request as JSON on stdin, the windows as JSON on stdout."""
    request = json.load(sys.stdin)
    runtime = HfRuntime()
    runtime.load(Path(request["folder"]), threads=request["threads"])
    drawn = sample(runtime, request["first"], request["windows"], request["seq_len"], request["seed"])
    sys.stdout.write(json.dumps(drawn.tolist()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
