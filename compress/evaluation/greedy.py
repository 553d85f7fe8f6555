"""Greedy continuations of prompts by any `Runtime`, in a process of its own.

All prompts go through together, though their lengths differ and nothing is padded: they are read as far as the
shortest goes, and from there on one position at a time, each row taking its prompt's next token while it has one and
the likeliest token after that. So each weight is read once a position for all prompts, and no mask is needed.

Left out: stopping a row's work when it has ended, which would change the batch that the others are computed in.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.models.load import hush
from compress.models.words import tokenizer
from compress.runtimes import RUNTIMES
from compress.runtimes.base import Runtime
from compress.tables import resolve
from compress.workers import serve, tell


def continuations(
    runtime: Runtime, prompts: Sequence[Sequence[int]], *, output: int, ends: Collection[int],
    progress: Callable[[int, int], None],
) -> list[list[int]]:  # fmt: skip
    """Each prompt's likeliest tokens one after the other, at most `output`; one of `ends` is the last.

    Args:
        prompts: token ids, at least one each.
    """
    assert output >= 1
    position = min(map(len, prompts))
    total = max(map(len, prompts)) - position + output
    written: list[list[int]] = [[] for _ in prompts]
    logits_BV = runtime.prefill(torch.tensor([prompt[:position] for prompt in prompts]))
    for step in range(total):
        progress(step, total)
        chosen = [int(token) for token in logits_BV.argmax(-1)]
        for prompt, said, token in zip(prompts, written, chosen, strict=True):
            if position >= len(prompt) and len(said) < output and not (said and said[-1] in ends):
                said.append(token)
        if all(len(said) == output or (said and said[-1] in ends) for said in written):
            break
        given = [p[position] if position < len(p) else token for p, token in zip(prompts, chosen, strict=True)]
        logits_BV = runtime.follow(None, torch.tensor(given).unsqueeze(1))[:, -1]
        position += 1
    return written


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker: what a model writes after each prompt, as tokens and as text, and whether it ended.

    Request: `model` (a folder), `runtime`, `dtype`, `threads`, `prompts` (token ids), `output`, `ends` (token ids).
    """
    folder, ends = Path(request["model"]), request["ends"]
    with contextlib.redirect_stdout(sys.stderr):
        hush()
        runtime = resolve(RUNTIMES, request["runtime"], kind="runtime")()
        runtime.load(folder, threads=request["threads"], dtype=request["dtype"], expand=True)
        words = tokenizer(folder)
        found = continuations(runtime, request["prompts"], output=request["output"], ends=ends, progress=tell)
        return [
            {
                "tokens": tokens,
                "text": words.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                "ended": tokens[-1] in ends,
            }
            for tokens in found
        ]


if __name__ == "__main__":
    raise SystemExit(serve(answer))
