"""Text drawn from the model itself, for `dataset: self`, in a process of its own.

Each window starts with the tokenizer's first token and is sampled token by token from the model's own
distribution (temperature 1), with a private seeded generator.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compress.runtimes.hf import HfRuntime
from compress.workers import call, serve

_BATCH = 16


def draw(folder: Path, first_token: int, windows: int, seq_len: int, seed: int, threads: int) -> Tensor:
    """int64 [windows, seq_len] sampled from the checkpoint in `folder`."""
    request = {
        "folder": str(folder), "first": first_token, "windows": windows, "seq_len": seq_len, "seed": seed,
        "threads": threads,
    }  # fmt: skip
    drawn = call("compress.runtimes.draw", request, what="drawing text from the model", where=str(folder))
    return torch.tensor(drawn)


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


def answer(request: dict[str, Any]) -> list[list[int]]:
    """The worker."""
    runtime = HfRuntime()
    runtime.load(Path(request["folder"]), threads=request["threads"])
    drawn = sample(runtime, request["first"], request["windows"], request["seq_len"], request["seed"])
    return cast("list[list[int]]", drawn.tolist())


if __name__ == "__main__":
    raise SystemExit(serve(answer))
