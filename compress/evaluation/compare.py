"""Accuracy of two models on the same documents: rows for the report, and the verdict.

The comparison is paired: each document has two answers, and the difference of the means is the mean of the
differences, whose interval is far narrower than those of the two means suggest. Pooled figures count every
document once. Chance is one over the number of choices. Beside each difference stand McNemar's exact p, corrected for
the number of tasks (Holm), and the smallest difference that so many documents would have shown.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.errors import CompressError
from compress.evaluation.intervals import Array, bootstrap, paired_difference, wilson
from compress.evaluation.metrics import METRICS, Row, Subject, row
from compress.evaluation.significance import (
    holm,
    mcnemar,
    more_needed,
    smallest_difference,
    smallest_difference_unpaired,
)
from compress.evaluation.suite import BINARY, Suite, Task

_OURS = {"perplexity": "target_perplexity"}  # lambada's is of a whole last word, not of a token
LOG_RATIO_DELTA = 0.05  # of the log of the perplexity ratio
Results = dict[str, dict[str, Any]]  # what `accuracy` answers for each task


def accuracy_rows(base: Results | None, artifact: Results, suite: Suite, conditions: dict[str, Any]) -> list[Row]:
    """The rows of both models' results and of their comparison; `base` None gives the artifact's alone."""
    assert suite.accuracy is not None
    rows: list[Row] = []
    pooled: list[Array] = []
    conditions = {**conditions, **_asked(base, artifact)}
    for task in suite.accuracy.tasks:
        found = artifact[task.task]
        where = {**conditions, "task_version": found["version"]}
        for subject, results in (("base", base), ("artifact", artifact)):
            if results is not None:
                rows += _task_rows(subject, task, results[task.task], where)  # type: ignore[arg-type]
        if base is not None and task.metric in BINARY:
            values_N3 = paired(base[task.task], found, task.metric)
            rows += _pair_rows(values_N3, task.task, {**where, "metric": task.metric})
            pooled.append(values_N3)
    if len(pooled) > 1:
        values_N3 = np.concatenate(pooled)
        rows += _pair_rows(values_N3, "pooled", conditions)
    if pooled:
        rows.append(_recovery(np.concatenate(pooled), conditions))
    return _corrected(rows)


def _asked(base: Results | None, artifact: Results) -> dict[str, Any]:
    """What both were asked by whom: tokens by their hash, whether a BOS stands in front, lm-eval's version.

    Raises:
        CompressError: base and artifact were not asked the same.
    """
    first, *others = [
        {key: found[key] for key in ("backend", "bos", "prompts")}
        for results in (artifact, base) if results is not None for found in results.values()
    ]  # fmt: skip
    for other in others:
        odd = [key for key in first if first[key] != other[key]]
        if odd:
            raise CompressError(
                f"the two models were not asked the same: {odd[0]} is {other[odd[0]]} and {first[odd[0]]}",
                where="the tasks", hint="give both the same tokenizer, and measure them with the same packages",
            )  # fmt: skip
    return first


def _corrected(rows: list[Row]) -> list[Row]:
    """The rows, p-values of tasks with what is left of them after Holm's correction."""
    tests = [r for r in rows if r["metric"] == "mcnemar_p" and r["task"] != "pooled"]
    left = dict(zip((r["task"] for r in tests), holm([r["value"] for r in tests]), strict=True))
    return [
        {**r, "context": {**r["context"], "holm": left[r["task"]], "tasks": len(left)}} if r in tests else r
        for r in rows
    ]


def _task_rows(subject: Subject, task: Task, result: dict[str, Any], conditions: dict[str, Any]) -> list[Row]:
    n = len(result["documents"])
    rows = []
    for reported, value in result["metrics"].items():
        metric = _OURS.get(reported, reported)
        if metric in METRICS:  # a task may report what nobody here has defined; it is kept with the documents
            low, high = wilson(value, n) if metric in BINARY else (None, None)
            counts = {"counts": reported == task.metric}
            rows.append(row(metric, subject, task.task, value, low=low, high=high, n=n, conditions=conditions,
                            context=counts))  # fmt: skip
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
    low, high = paired_difference(difference_N)
    n = len(difference_N)
    gained, lost = int((difference_N > 0).sum()), int((difference_N < 0).sum())
    note = {"interval": "95%, paired bootstrap over documents"}
    return [
        row("acc_delta", "pair", task, float(difference_N.mean()), low=low, high=high, n=n, conditions=conditions,
            context=note),
        row("flips", "pair", task, (gained + lost) / n, n=n, conditions=conditions,
            context={"gained": gained, "lost": lost}),
        row("mcnemar_p", "pair", task, mcnemar(lost, gained), n=n, conditions=conditions),
        row("smallest_difference", "pair", task, smallest_difference(n, gained + lost), n=n, conditions=conditions,
            context={"unpaired": smallest_difference_unpaired(n, tuple(values_N3[:, :2].mean(0).tolist()))}),
    ]  # fmt: skip


def _recovery(values_N3: Array, conditions: dict[str, Any]) -> Row:
    low, high = bootstrap(recovery, values_N3)
    value = float(recovery(values_N3.mean(0, keepdims=True))[0])
    note = {"interval": "95%, paired bootstrap over documents", "chance": float(values_N3[:, 2].mean())}
    return row("recovery", "pair", "pooled", value, low=low, high=high, n=len(values_N3), conditions=conditions,
               context=note)  # fmt: skip


def recovery(mean_D3: Array) -> Array:
    """(artifact − chance) / (base − chance) of means [D, 3], [D]; not a number where the base is at chance."""
    base_D, artifact_D, chance_D = mean_D3.T
    above_D = np.where(base_D > chance_D, base_D - chance_D, math.nan)
    recovered_D: Array = (artifact_D - chance_D) / above_D
    return recovered_D


def verdict(rows: Sequence[Row], suite: Suite, delta: float) -> dict[str, Any] | None:
    """What the evidence supports; None where there is no comparison to rest it on.

    Args:
        delta: the difference in absolute accuracy that still counts as "as good".
    """
    by_accuracy = suite.basis == "accuracy"
    metric, better, margin = ("acc_delta", 1, delta) if by_accuracy else ("nll_delta", -1, LOG_RATIO_DELTA)
    found = {r["task"]: r for r in rows if r["metric"] == metric}
    if by_accuracy:
        overall = found.get("pooled") or next(iter(found.values()), None)
        tasks = {task: _side(r, better, margin) for task, r in found.items() if task != "pooled"}
        what, where = "accuracy difference", f"above −{margin:g}"
    else:
        overall, tasks = found.get(suite.text.name), {}
        what, where = "log of the perplexity ratio", f"below {margin:g}"
    if overall is None:
        return None
    broken = any(r["metric"] == "nonfinite" and r["value"] for r in rows)
    open_ones = {"overall": overall, **{task: found[task] for task in tasks}}
    needs = {
        name: _needs(r, better, margin) for name, r in open_ones.items() if _side(r, better, margin) == "undecided"
    }
    return {
        "overall": "worse" if broken else _side(overall, better, margin),
        "delta": margin, "basis": suite.basis, "tasks": tasks,
        "needs": needs, "cases": "documents" if by_accuracy else f"windows of {suite.text.seq_len} tokens",
        **{key: _number(overall[key]) for key in ("value", "low", "high")},
        "rule": f"non-inferior when the whole 95% interval of the {what} lies {where}, worse when all of it lies on "
        "the other side, undecided otherwise; worse too where a prediction is no finite number",
    }  # fmt: skip


def _side(row: Row, better: int, margin: float) -> str:
    """Where the interval lies; `better` is 1 where more is better, −1 where less is."""
    ends = [_number(row[key]) for key in ("value", "low", "high")]
    if ends[0] is None:
        return "worse"  # a model that gives no numbers
    if None in ends:
        return "undecided"  # too little to have an interval
    low, high = sorted(better * end for end in ends[1:] if end is not None)
    if low > -margin:
        return "non_inferior"
    return "worse" if high < -margin else "undecided"


def _needs(row: Row, better: int, margin: float) -> int | None:
    """About how many more cases would decide; None where that cannot be said."""
    value, low, high = (_number(row[key]) for key in ("value", "low", "high"))
    if value is None or low is None or high is None or row["n"] is None:
        return None
    ends = sorted((better * low, better * high))
    return more_needed(row["n"], better * value, (ends[0], ends[1]), -margin)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
