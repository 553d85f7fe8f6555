"""Paired accuracy on ten documents that can be counted by hand, and what a verdict may be given for."""

import math
from typing import Any

import numpy as np
import pytest

from compress.errors import CompressError
from compress.evaluation.compare import accuracy_rows, paired, recovery, verdict
from compress.evaluation.metrics import Row, row
from compress.evaluation.suite import Suite

SUITE = Suite.model_validate(
    {
        "version": 1, "summary": "s", "basis": "accuracy",
        "accuracy": {
            "tasks": [{"task": "a"}, {"task": "b", "metric": "acc_norm"}, {"task": "w", "metric": "word_perplexity"}],
        },
    }
)  # fmt: skip


ASKED = {"backend": "x", "bos": True, "prompts": "0123"}


def task(metric: str, right: str, choices: int = 4) -> dict[str, Any]:
    """Results of a task; `right` has a 1 for each document answered rightly."""
    documents = [
        {"document": f"d{i}", "choices": choices, "logprobs": [0.0], metric: float(mark)}
        for i, mark in enumerate(right)
    ]
    return {
        "documents": documents,
        "metrics": {metric: right.count("1") / len(right)},
        "version": "1.0",
        **ASKED,
    }


WORDS = {"documents": [{"document": "d0", "choices": None, "logprobs": [-3.0], "perplexity": -3.0}],
         "metrics": {"perplexity": 20.1, "odd_metric": 1.0}, "version": "1.0", **ASKED}  # fmt: skip
BASE = {"a": task("acc", "1111100000"), "b": task("acc_norm", "1100", choices=2), "w": WORDS}
ARTIFACT = {"a": task("acc", "1110010000"), "b": task("acc_norm", "1100", choices=2), "w": WORDS}


def by(rows: list[Row]) -> dict[tuple[str, str, str], Row]:
    return {(r["metric"], r["subject"], r["task"]): r for r in rows}


def test_ten_documents_by_hand() -> None:
    found = by(accuracy_rows(BASE, ARTIFACT, SUITE, {"dtype": "float32"}))
    assert found["acc", "base", "a"]["value"] == 0.5
    assert found["acc", "artifact", "a"]["value"] == 0.4
    assert found["acc", "artifact", "a"]["low"] == pytest.approx(0.1682, abs=1e-4)  # Wilson, 4 of 10
    assert found["acc_delta", "pair", "a"]["value"] == pytest.approx(-0.1)
    assert found["flips", "pair", "a"]["value"] == pytest.approx(0.3)
    assert found["flips", "pair", "a"]["context"] == {"gained": 1, "lost": 2}
    b = found["acc_delta", "pair", "b"]
    assert b["low"] < b["value"] == 0 < b["high"]  # four documents that stayed prove little
    assert (found["acc", "base", "a"]["context"], found["acc_norm", "base", "b"]["context"]) == ({"counts": True},) * 2
    assert found["acc_delta", "pair", "pooled"]["value"] == pytest.approx(-1 / 14)
    assert found["mcnemar_p", "pair", "a"]["value"] == 1  # two against one, either way
    assert found["mcnemar_p", "pair", "a"]["context"] == {"holm": 1, "tasks": 2}
    assert "holm" not in found["mcnemar_p", "pair", "pooled"]["context"]
    seen = found["smallest_difference", "pair", "a"]
    assert seen["value"] == pytest.approx(2.8016 * math.sqrt(5 / 12 / (10 + 2.8016**2)), rel=1e-4)
    assert seen["context"]["unpaired"] == pytest.approx(2.8016 * math.sqrt((0.25 + 0.24) / 10), rel=1e-4)
    assert found["acc_delta", "pair", "pooled"]["n"] == 14
    chance = (10 / 4 + 4 / 2) / 14
    wanted = (6 / 14 - chance) / (7 / 14 - chance)
    assert found["recovery", "pair", "pooled"]["value"] == pytest.approx(wanted)
    assert found["target_perplexity", "artifact", "w"]["value"] == 20.1
    assert ("acc_delta", "pair", "w") not in found
    assert {r["conditions"]["backend"] for r in found.values()} == {"x"}


def test_the_two_were_asked_the_same() -> None:
    rows = accuracy_rows(BASE, ARTIFACT, SUITE, {"dtype": "float32"})
    assert all({**r["conditions"], **ASKED} == r["conditions"] for r in rows)
    for key, other in {"prompts": "4567", "bos": False, "backend": "y"}.items():
        with pytest.raises(CompressError, match=f"not asked the same: {key}"):
            accuracy_rows(BASE, {**ARTIFACT, "b": {**ARTIFACT["b"], key: other}}, SUITE, {})


def test_documents_are_paired_by_name_not_by_place() -> None:
    shuffled = {**ARTIFACT["a"], "documents": ARTIFACT["a"]["documents"][::-1]}
    once, again = paired(BASE["a"], ARTIFACT["a"], "acc"), paired(BASE["a"], shuffled, "acc")
    assert sorted(map(tuple, once)) == sorted(map(tuple, again))


def test_a_model_against_itself_recovers_everything() -> None:
    base = {**BASE, "a": task("acc", "1" * 9 + "0")}
    found = by(accuracy_rows(base, base, SUITE, {}))
    pooled = found["recovery", "pair", "pooled"]
    assert (pooled["value"], pooled["low"], pooled["high"]) == (1, 1, 1)
    assert found["flips", "pair", "pooled"]["value"] == 0


def test_one_model_alone_has_no_pair() -> None:
    rows = accuracy_rows(None, ARTIFACT, SUITE, {})
    assert {r["subject"] for r in rows} == {"artifact"}
    assert verdict(rows, SUITE, 0.01) is None


def test_a_base_near_chance_gives_recovery_no_interval() -> None:
    pooled = by(accuracy_rows(BASE, BASE, SUITE, {}))["recovery", "pair", "pooled"]
    assert pooled["value"] == 1
    assert math.isnan(pooled["low"])  # drawn again, such a base is at chance too often


def test_recovery_of_a_base_at_chance_is_no_number() -> None:
    assert math.isnan(recovery(np.array([[0.5, 1, 0.5]]))[0])
    assert recovery(np.array([[0.75, 0.5, 0.25], [0.75, 0.75, 0.25]])).tolist() == [0.5, 1]


def delta(value: float | None, low: float | None, high: float | None, task: str = "pooled") -> Row:
    return row("acc_delta", "pair", task, value, low=low, high=high, n=9)


@pytest.mark.parametrize(
    ("value", "low", "high", "overall"),
    [
        (0.0, -0.009, 0.01, "non_inferior"), (0.02, 0.01, 0.03, "non_inferior"), (-0.05, -0.08, -0.02, "worse"),
        (-0.005, -0.02, 0.01, "undecided"), (-0.02, -0.03, -0.01, "undecided"), (None, None, None, "worse"),
        (math.nan, math.nan, math.nan, "worse"),
    ],
)  # fmt: skip
def test_a_verdict_needs_the_whole_interval(value: Any, low: Any, high: Any, overall: str) -> None:
    given = verdict([delta(value, low, high), delta(0.0, -0.2, 0.2, "a")], SUITE, 0.01)
    assert given
    assert given["overall"] == overall
    assert given["tasks"] == {"a": "undecided"}
    assert (given["basis"], given["delta"]) == ("accuracy", 0.01)


@pytest.mark.parametrize(
    ("difference", "overall"),
    [((0.02, 0.01, 0.04), "non_inferior"), ((0.2, 0.1, 0.3), "worse"), ((0.05, 0.02, 0.08), "undecided"),
     ((-0.1, -0.2, -0.01), "non_inferior"), ((math.inf, math.inf, math.inf), "worse"), ((None, None, None), "worse"),
     ((0.01, None, None), "undecided")],
)  # fmt: skip
def test_a_verdict_by_perplexity(difference: tuple[float, float, float], overall: str) -> None:
    value, low, high = difference
    suite = SUITE.model_copy(update={"basis": "perplexity"})
    rows = [row("nll_delta", "pair", task, value, low=low, high=high) for task in ("embedded", "heldout")]
    given = verdict(rows, suite, 0.01)
    assert given
    assert given["overall"] == overall
    assert given["delta"] == 0.05
    assert verdict(rows[1:], suite, 0.01) is None  # the walk's held-out text is not the suite's
