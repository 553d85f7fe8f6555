"""What two models write after the same prompts, greedily: how long they agree, how much they repeat, whether they end.

Likelihoods compare models on text that others wrote; here each reads its own. One different token sends the two
outputs apart for good, so the length of agreement says how soon a user would see a difference, not how bad it is;
that the model goes round in circles, or no longer ends, is bad.

Left out: judging what is written; sampling; chat templates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import mean, median
from typing import Any

import numpy as np

from compress.evaluation.intervals import Array, bootstrap, wilson
from compress.evaluation.metrics import Row, Subject, row

NGRAM = 4  # tokens that make a repetition
METRICS = ("greedy_agreement", "greedy_agreement_median", "repetition", "endings")
Output = dict[str, Any]  # `tokens`, an end token last where there is one; `text`; `ended`


@dataclass(frozen=True)
class Written:
    """A prompt and what was written after it, for readers; `base` None where one checkpoint was measured alone."""

    kind: str
    prompt: str
    base: str | None
    artifact: str


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens two outputs, or characters two texts, share before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def agreement(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Tokens before the first that differs; `limit`, the most that were asked for, where none does."""
    return limit if list(one) == list(other) else alike(one, other)


def repeated(tokens: Sequence[int], n: int = NGRAM) -> int:
    """How many tokens end an n-gram that was there before in the same output; the two may overlap."""
    seen: set[tuple[int, ...]] = set()
    count = 0
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        count += gram in seen
        seen.add(gram)
    return count


def generation_rows(
    base: Sequence[Output] | None, artifact: Sequence[Output], task: str, conditions: dict[str, Any]
) -> list[Row]:
    """The rows of both models' outputs and of their comparison; `base` None gives the artifact's alone.

    Args:
        conditions: of every row; `output` is the most tokens of an output.
    """
    rows: list[Row] = []
    if base is not None:
        limit = conditions["output"]
        lengths = [agreement(b["tokens"], a["tokens"], limit) for b, a in zip(base, artifact, strict=True)]
        low, high = bootstrap(lambda mean_D1: mean_D1[:, 0], np.array(lengths, dtype=np.float64)[:, None])
        same = sum(b["tokens"] == a["tokens"] for b, a in zip(base, artifact, strict=True))
        common: dict[str, Any] = {"n": len(lengths), "conditions": conditions}
        rows = [
            row("greedy_agreement", "pair", task, mean(lengths), low=low, high=high, **common,
                context={"identical": same, "interval": "95%, bootstrap over prompts"}),
            row("greedy_agreement_median", "pair", task, median(lengths), **common),
        ]  # fmt: skip
        rows += _own_rows("base", base, task, conditions)
    return rows + _own_rows("artifact", artifact, task, conditions)


def _own_rows(subject: Subject, outputs: Sequence[Output], task: str, conditions: dict[str, Any]) -> list[Row]:
    """What one model's outputs show by themselves."""
    counts_N2 = np.array([(repeated(o["tokens"]), len(o["tokens"])) for o in outputs], dtype=np.float64)
    low, high = bootstrap(_share, counts_N2)
    share = float(_share(counts_N2.mean(0, keepdims=True))[0])
    ended = sum(o["ended"] for o in outputs) / len(outputs)
    ended_low, ended_high = wilson(ended, len(outputs))
    return [
        row("repetition", subject, task, share, low=low, high=high, n=int(counts_N2[:, 1].sum()),
            conditions={**conditions, "ngram": NGRAM}, context={"interval": "95%, bootstrap over prompts"}),
        row("endings", subject, task, ended, low=ended_low, high=ended_high, n=len(outputs), conditions=conditions),
    ]  # fmt: skip


def _share(mean_D2: Array) -> Array:
    """Repetitions by tokens, of means of both [D, 2]."""
    share_D: Array = mean_D2[:, 0] / mean_D2[:, 1]
    return share_D
