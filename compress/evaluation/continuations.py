"""What models wrote after a suite's prompts: asked of the worker once, then remembered, and kept for readers.

Both models are given the same tokens and the same end tokens, those of the base where there is one.
"""

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compress import keys
from compress.artifact import GENERATION
from compress.calibration.tokens import text_ids, untouched
from compress.errors import CompressError
from compress.evaluation.generation import Output, Written, alike
from compress.evaluation.prompts import Prompts
from compress.evaluation.questions import remembered
from compress.evaluation.suite import Suite, prompts_of
from compress.files import replace
from compress.models.files import max_positions, read_json
from compress.models.words import end_tokens, tokenizer
from compress.workers import call


def prompt_ids(suite: Suite, folder: Path) -> list[list[int]]:
    """The suite's prompts as a model's tokens.

    Raises:
        CompressError: a prompt gives no token, or is too long for what the model can see.
    """
    assert suite.generation is not None
    words, prompts = tokenizer(folder), prompts_of(suite)
    where = f"suite {suite.name}, generation.prompts"
    with untouched(words):
        ids = [text_ids(words, text) for text in prompts.texts]
    positions = max_positions(read_json(folder / "config.json"))
    for prompt, tokens in zip(prompts.prompts, ids, strict=True):
        said = repr(prompt.text if len(prompt.text) <= 40 else prompt.text[:39] + "…")
        if not tokens:
            raise CompressError(f"the tokenizer makes no token of the prompt {said}", where=where, hint="leave it out")
        most = len(tokens) + suite.generation.output
        if 0 < positions < most:
            raise CompressError(
                f"the prompt {said} and {suite.generation.output} new tokens are {most} tokens, "
                f"and the model sees {positions}",
                where=where, hint="ask for a shorter `output`, or name other prompts",
            )  # fmt: skip
    return ids


def outputs(
    model: Path, ids: list[list[int]], ends: list[int], output: int, *, dtype: str, threads: int,
    progress: Callable[[int, int], None],
) -> list[Output]:  # fmt: skip
    """What the checkpoint in a folder writes, from the cache where it is known.

    Args:
        ids: the prompts' tokens.
        ends: tokens that end an output.
        output: the most tokens of one.
    """
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    key = keys.stage_key(
        [keys.checkpoint_key(model), ids, sorted(ends), output, dtype, libraries],
        "evaluation/greedy.py", "runtimes/hf.py",
    )  # fmt: skip
    request = {
        "model": str(model.resolve()), "runtime": "hf", "dtype": dtype, "threads": threads, "prompts": ids,
        "output": output, "ends": ends,
    }  # fmt: skip

    def ask() -> Any:
        return call(
            "compress.evaluation.greedy", request, what="writing after the prompts", where=str(model),
            progress=progress,
        )  # fmt: skip

    return list(remembered("continuations", key, ask))


def endings(folder: Path) -> list[int]:
    """The tokens by which a model ends its output."""
    return end_tokens(folder, tokenizer(folder))


def forget(home: Path) -> None:
    """Deletes the texts that an earlier suite left."""
    (home / GENERATION).unlink(missing_ok=True)


def read(home: Path) -> list[Written]:
    """The texts that `keep` wrote; none where there are none, or a file that is damaged."""
    try:
        lines = (home / GENERATION).read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [
            Written(str(f["kind"]), str(f["prompt"]), _shown(f["base"]) if "base" in f else None, _shown(f["artifact"]))
            for f in found
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _shown(output: Output) -> str:
    """A text as a reader sees it: one that went on when the limit came ends in dots."""
    return str(output["text"]) + ("" if output["ended"] else "…")


def keep(home: Path, prompts: Prompts, base: Sequence[Output] | None, artifact: Sequence[Output]) -> None:
    """Writes `generation.jsonl`: for each prompt what both wrote, and how many tokens are alike, one line each."""
    lines = []
    for i, (prompt, mine) in enumerate(zip(prompts.prompts, artifact, strict=True)):
        theirs = None if base is None else base[i]
        found: dict[str, Any] = {"kind": prompt.kind, "prompt": prompt.text}
        if theirs is not None:
            found |= {"alike": alike(theirs["tokens"], mine["tokens"]), "base": theirs}
        lines.append(json.dumps({**found, "artifact": mine}))
    replace(home / GENERATION, ("\n".join(lines) + "\n").encode())
