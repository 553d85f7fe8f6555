"""Verdicts on planted damage: what is equal is never worse, what is bad always is, and few documents decide nothing."""

from typing import Any

import numpy as np
import pytest

from compress.evaluation.compare import accuracy_rows, verdict
from compress.evaluation.suite import Suite

ASKED = {"backend": "x", "bos": True, "prompts": "0123"}
TASKS = 7
DELTA = 0.01


def suite(tasks: int) -> Suite:
    named = [{"task": f"t{i}", "metric": "acc"} for i in range(tasks)]
    asked = {"version": 1, "summary": "s", "accuracy": {"tasks": named}, "basis": "accuracy"}
    return Suite.model_validate(asked)


def results(right_N: np.ndarray[Any, Any], tasks: int) -> dict[str, dict[str, Any]]:
    """Answers to documents of several tasks, four choices each."""
    return {
        f"t{i}": {
            "documents": [{"document": f"d{j}", "choices": 4, "acc": float(r)} for j, r in enumerate(part_n)],
            "metrics": {"acc": float(part_n.mean())}, "version": "1.0", **ASKED,
        }
        for i, part_n in enumerate(np.split(right_N, tasks))
    }  # fmt: skip


def judged(base_N: np.ndarray[Any, Any], artifact_N: np.ndarray[Any, Any], tasks: int = TASKS) -> dict[str, Any]:
    asked = suite(tasks)
    given = verdict(accuracy_rows(results(base_N, tasks), results(artifact_N, tasks), asked, {}), asked, DELTA)
    assert given
    return given


def half_right(n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).permutation(np.arange(n) % 2).astype(float)


def spoilt(base_N: np.ndarray[Any, Any], lost: int, gained: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Some right answers made wrong, and some wrong ones right."""
    source, made_N = np.random.default_rng(seed), base_N.copy()
    made_N[source.choice(np.flatnonzero(base_N == 1), lost, replace=False)] = 0
    made_N[source.choice(np.flatnonzero(base_N == 0), gained, replace=False)] = 1
    return made_N


def test_a_model_against_itself_is_as_good() -> None:
    base_N = half_right(1400)
    given = judged(base_N, base_N)
    assert given["overall"] == "non_inferior"
    assert given["value"] == 0
    assert "worse" not in given["tasks"].values()


@pytest.mark.parametrize(("lost", "gained"), [(1, 0), (0, 1)])
def test_one_changed_document_changes_no_verdict(lost: int, gained: int) -> None:
    base_N = half_right(1400)
    given = judged(base_N, spoilt(base_N, lost, gained))
    assert given["overall"] == "non_inferior"
    assert given["low"] < (gained - lost) / 1400 < given["high"]


def test_slight_damage_is_undecided_and_says_how_many_would_decide() -> None:
    base_N = half_right(1400)
    given = judged(base_N, spoilt(base_N, 80, 60))  # −1.4 points, where −1 is allowed
    assert given["overall"] == "undecided"
    assert given["low"] < -DELTA < given["high"]
    more = given["needs"]["overall"]
    assert more > 1400
    times = round(more / 1400) + 1  # so many of the same kind
    again_N = np.tile(base_N, times)
    parts = [spoilt(base_N, 80, 60, seed) for seed in range(times)]
    assert judged(again_N, np.concatenate(parts))["overall"] == "worse"


def test_slight_damage_within_the_margin_is_shown_to_be_by_enough_documents() -> None:
    base_N = half_right(14000)
    assert judged(base_N, spoilt(base_N, 110, 60))["overall"] == "non_inferior"  # −0.36 points


@pytest.mark.parametrize("right", [0.25, 0.4])  # as by chance, and ten points less
def test_bad_damage_is_worse(right: float) -> None:
    base_N = half_right(1400)
    chosen_N = (np.random.default_rng(2).random(1400) < right).astype(float)
    given = judged(base_N, chosen_N)
    assert given["overall"] == "worse"
    assert set(given["tasks"].values()) <= {"worse", "undecided"}


@pytest.mark.parametrize("n", [4, 30])
def test_few_documents_decide_nothing(n: int) -> None:
    base_N = half_right(n)
    for artifact_N in (base_N, spoilt(base_N, 1, 0)):
        given = judged(base_N, artifact_N, tasks=1)
        assert given["overall"] == "undecided"
        assert given["low"] < -DELTA


def test_equally_good_models_are_seldom_called_worse_and_bad_ones_seldom_good() -> None:
    """At the margin itself either verdict is a mistake: each is made less often than once in forty, about."""
    n, base_N = 700, half_right(700)
    source = np.random.default_rng(3)
    verdicts = []
    for _ in range(120):
        changed_N = source.random(n)
        # of the right 6% are lost and of the wrong 4% gained: one point in all
        artifact_N = np.where(base_N == 1, changed_N > 0.06, changed_N < 0.04).astype(float)
        verdicts.append(judged(base_N, artifact_N, tasks=1)["overall"])
    assert verdicts.count("worse") <= 8
    assert verdicts.count("non_inferior") <= 8
    assert verdicts.count("undecided") >= 104
