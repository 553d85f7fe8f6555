"""Accuracy of two models on the same documents: rows for the report, and the verdict.

The comparison is paired: each document has two answers, and the difference of the means is the mean of the
differences, whose interval is far narrower than those of the two means suggest. Pooled figures count every
document once. Chance is one over the number of choices.

Left out: p-values, power and corrections for many tasks.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.evaluation.intervals import Array, bootstrap, mean_interval, wilson
from compress.evaluation.metrics import METRICS, Row, Subject, row
from compress.evaluation.suite import BINARY, Suite

PERPLEXITY_DELTA = 0.05  # of the log of the perplexity ratio
Results = dict[str, dict[str, Any]]  # what `accuracy` answers for each task


def accuracy_rows(base: Results | None, artifact: Results, suite: Suite, conditions: dict[str, Any]) -> list[Row]:
    """The rows of both models' results and of their comparison; `base` None gives the artifact's alone."""
    assert suite.accuracy is not None
    rows: list[Row] = []
    pooled: list[Array] = []
    conditions = {**conditions, "backend": next(iter(artifact.values()))["backend"]}
    for task in suite.accuracy.tasks:
        found = artifact[task.task]
        where = {**conditions, "task_version": found["version"]}
        for subject, results in (("base", base), ("artifact", artifact)):
            if results is not None:
                rows += _task_rows(subject, task.task, results[task.task], where)  # type: ignore[arg-type]
        if base is not None and task.metric in BINARY:
            values_N3 = paired(base[task.task], found, task.metric)
            rows += _pair_rows(values_N3, task.task, {**where, "metric": task.metric})
            pooled.append(values_N3)
    if len(pooled) > 1:
        values_N3 = np.concatenate(pooled)
        rows += _pair_rows(values_N3, "pooled", conditions)
    if pooled:
        rows.append(_recovery(np.concatenate(pooled), conditions))
    return rows


def _task_rows(subject: Subject, task: str, result: dict[str, Any], conditions: dict[str, Any]) -> list[Row]:
    n = len(result["documents"])
    rows = []
    for metric, value in result["metrics"].items():
        if metric in METRICS:  # a task may report what nobody here has defined; it is kept with the documents
            low, high = wilson(value, n) if metric in BINARY else (None, None)
            rows.append(row(metric, subject, task, value, low=low, high=high, n=n, conditions=conditions))
    return rows


def paired(base: dict[str, Any], artifact: dict[str, Any], metric: str) -> Array:
    """Base right, artifact right, and chance, for each document [N, 3]; both must be of the same documents."""
    known = {document["document"]: document for document in base["documents"]}
    assert known.keys() == {document["document"] for document in artifact["documents"]}
    return np.array(
        [
            (known[d["document"]][metric], d[metric], 1 / d["choices"] if d["choices"] else 0.0)
            for d in artifact["documents"]
        ],
        dtype=np.float64,
    )


def _pair_rows(values_N3: Array, task: str, conditions: dict[str, Any]) -> list[Row]:
    difference_N = values_N3[:, 1] - values_N3[:, 0]
    low, high = mean_interval(difference_N)
    n = len(difference_N)
    gained, lost = int((difference_N > 0).sum()), int((difference_N < 0).sum())
    note = {"interval": "95%, paired bootstrap over documents"}
    return [
        row("acc_delta", "pair", task, float(difference_N.mean()), low=low, high=high, n=n, conditions=conditions,
            context=note),
        row("flips", "pair", task, (gained + lost) / n, n=n, conditions=conditions,
            context={"gained": gained, "lost": lost}),
    ]  # fmt: skip


def _recovery(values_N3: Array, conditions: dict[str, Any]) -> Row:
    low, high = bootstrap(recovery, values_N3)
    value = recovery(values_N3)
    note = {"interval": "95%, paired bootstrap over documents", "chance": float(values_N3[:, 2].mean())}
    return row("recovery", "pair", "pooled", value, low=low, high=high, n=len(values_N3), conditions=conditions,
               context=note)  # fmt: skip


def recovery(values_N3: Array) -> float:
    """(artifact − chance) / (base − chance); not a number where the base is at chance."""
    base, artifact, chance = values_N3.mean(0)
    return float((artifact - chance) / (base - chance)) if base > chance else math.nan


def verdict(rows: Sequence[Row], suite: Suite, delta: float) -> dict[str, Any] | None:
    """What the evidence supports; None where there is no comparison to rest it on.

    Args:
        delta: the difference in absolute accuracy that still counts as "as good".
    """
    if suite.basis == "accuracy":
        found = {r["task"]: r for r in rows if r["metric"] == "acc_delta"}
        overall = found.get("pooled") or next(iter(found.values()), None)
        if overall is None:
            return None
        tasks = {t: _side(r["value"], r["low"], r["high"], delta) for t, r in found.items() if t != "pooled"}
        low, high, value, unit = overall["low"], overall["high"], overall["value"], "accuracy difference"
    else:
        ratio = next((r for r in rows if r["metric"] == "perplexity_ratio" and r["task"] == suite.text.name), None)
        if ratio is None:
            return None
        delta, tasks, unit = PERPLEXITY_DELTA, {}, "log of the perplexity ratio, turned around,"
        value, high, low = (_minus_log(ratio[key]) for key in ("value", "low", "high"))
    return {
        "overall": _side(value, low, high, delta), "delta": delta, "basis": suite.basis, "tasks": tasks,
        "value": value, "low": low, "high": high,
        "rule": f"non-inferior when the whole 95% interval of the {unit} lies above −{delta:g}, worse when all of it "
        "lies below, undecided otherwise",
    }  # fmt: skip


def _minus_log(ratio: float | None) -> float | None:
    return None if ratio is None or not math.isfinite(ratio) or ratio <= 0 else -math.log(ratio)


def _side(value: float | None, low: float | None, high: float | None, delta: float) -> str:
    if value is None or low is None or high is None or not all(map(math.isfinite, (value, low, high))):
        return "worse"  # a model that gives no numbers
    if low > -delta:
        return "non_inferior"
    return "worse" if high < -delta else "undecided"
