"""What the samples of the speed harness come to: the rows of one subject; pure.

The figure is the median, its range stands in `low` and `high`, and warm-ups are dropped and their number recorded.

What the times cover: `ttft_s` is one prefill pass and the choice of the first token, without tokenising or a
queue; the times between tokens are those of the decode passes after it, pooled over repeats and processes, so that a
99th percentile of few is near their maximum, and `n` says of how many. `load_s` is opening the folder and the first
forward pass (by the end of which compressed weights are decompressed, or packed).

How far from the limit: a decode pass reads all weights once, and the keys and values of the batch at its mean length.
`mbu` is that over the time between tokens and the machine's bandwidth; `ceiling_tok_s` what the bandwidth would allow.
`mfu` counts a multiplication and an addition for each weight of a linear layer and prompt token, without attention and
head, over the machine's rate in bfloat16; with a kernel that multiplies integers it may exceed 1.

Other work on the machine ruins a speed. It cannot be kept away from here, so it is recorded: the load average
before the run, and `cpu_share`, the least share of its threads' time that a worker got (near 1 when alone).
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from compress.evaluation.energy import WHY_NOT
from compress.evaluation.metrics import Row, Subject, row
from compress.evaluation.timing import Point, PointTimes, Sample

POINT_METRICS = ("prefill_tok_s", "decode_tok_s", "ttft_s", "itl_s")  # of which a point that was not run has rows too
_COVERS = "resident high-water mark of the worker: interpreter, libraries, mapped weights, cache, activations"


def summarize(
    subject: Subject,
    samples: Sequence[Sample],
    grid: Sequence[Point],
    machine: Mapping[str, float],
    conditions: dict[str, Any],
    context: dict[str, Any],
    given: Mapping[Point, str],
) -> list[Row]:
    """The rows of one subject from its workers' samples.

    Args:
        grid: the points, in the rows' order.
        machine: `machine.limits`.
        conditions: runtime, threads, dtype, hardware; the samples add device and versions, the points theirs.
        context: what is merely of interest, copied into every row.
        given: points that were given up, and why.
    """
    assert samples
    loaded = samples[0].loaded
    facts = loaded.facts
    shared = {**conditions, "device": loaded.device, **facts["versions"]}
    context = {
        **context, "cpu_share": min(sample.cpu_share for sample in samples), "weights": facts["weights"],
        "kernels": facts["kernels"], "notes": list(facts["notes"]),
    }  # fmt: skip
    rows = _load_rows(subject, samples, shared, context)
    rows.append(row("weight_bytes", subject, "speed", facts["weight_bytes"], conditions=shared, context=context))
    run: list[Point] = []
    for point in grid:
        parts = [times for sample in samples for times in sample.points if times.point == point]
        whole = [times for times in parts if times.skipped is None]
        if whole:
            run.append(point)
            rows += _point_rows(subject, whole, facts, machine, shared, context)
        else:
            why = next((times.skipped for times in parts), given.get(point))
            rows += _skipped_rows(subject, point, shared, context | {"skipped": why})
    if not any(r["metric"] == "energy_j" for r in rows):
        rows.append(row("energy_j", subject, "speed", None, conditions=shared, context=context | {"absent": WHY_NOT}))
    return [*rows, _peak_row(subject, samples, run, shared, context)]


def _load_rows(
    subject: Subject, samples: Sequence[Sample], shared: dict[str, Any], context: dict[str, Any]
) -> list[Row]:
    """Time to load, by where the weights' pages were."""
    rows = []
    for cache in dict.fromkeys(sample.loaded.page_cache for sample in samples):
        loads = [sample.loaded for sample in samples if sample.loaded.page_cache == cache]
        note = {
            "spread": "min–max over processes",
            "opening_s": statistics.median(load.opening_s for load in loads),
            "first_forward_s": statistics.median(load.first_forward_s for load in loads),
        }
        seconds = [load.opening_s + load.first_forward_s for load in loads]
        rows.append(_spread("load_s", subject, seconds, {**shared, "page_cache": cache}, context | note))
    return rows


def _point_rows(
    subject: Subject,
    parts: Sequence[PointTimes],
    facts: Mapping[str, Any],
    machine: Mapping[str, float],
    shared: dict[str, Any],
    context: dict[str, Any],
) -> list[Row]:
    """The rows of one point, its repeats pooled over the workers."""
    point = parts[0].point
    where = {**shared, **dataclasses.asdict(point)}
    prefills = [seconds for part in parts for seconds in part.prefill_s]
    runs = [run for part in parts for run in part.steps_s]
    steps = [seconds for run in runs for seconds in run]
    note = context | {"spread": "min–max over repeats"}
    prefill_tok_s = [point.batch * point.context / seconds for seconds in prefills]
    decode_tok_s = [point.batch * len(run) / sum(run) for run in runs]
    rows = [
        _spread("prefill_tok_s", subject, prefill_tok_s, where, note),
        _spread("decode_tok_s", subject, decode_tok_s, where, note),
        _spread("ttft_s", subject, prefills, where, note),
        row("itl_s", subject, "speed", statistics.median(steps), low=percentile(steps, 10),
            high=percentile(steps, 90), n=len(steps), conditions=where,
            context=context | {"spread": "p10–p90 over steps"}),
    ]  # fmt: skip
    for name, times in (("ttft", prefills), ("itl", steps)):
        rows += [
            row(f"{name}_p{percent}_s", subject, "speed", percentile(times, percent), n=len(times), conditions=where,
                context=context) for percent in (90, 99)
        ]  # fmt: skip
    rows += _limit_rows(subject, point, statistics.median(steps), statistics.median(prefill_tok_s), facts, machine,
                        where, context)  # fmt: skip
    joules = [part.joules for part in parts if part.joules is not None]
    return rows + ([_spread("energy_j", subject, joules, where, context)] if joules else [])


def _limit_rows(
    subject: Subject,
    point: Point,
    itl_s: float,
    prefill_tok_s: float,
    facts: Mapping[str, Any],
    machine: Mapping[str, float],
    where: dict[str, Any],
    context: dict[str, Any],
) -> list[Row]:
    """Bytes of keys and values, and how near both speeds are to what the machine could do."""
    tokens, per_token = point.context + point.output, facts["kv_bytes_per_token"]
    rows = [
        row("kv_cache_bytes", subject, "speed", point.batch * tokens * per_token, conditions=where, context=context)
    ]
    if facts["read_bytes"]:
        read = facts["read_bytes"] + point.batch * (point.context + point.output / 2) * per_token
        note = context | {"bandwidth": machine["bandwidth"], "bytes_per_pass": read}
        ceiling = point.batch * machine["bandwidth"] / read
        rows.append(row("ceiling_tok_s", subject, "speed", ceiling, conditions=where, context=note))
        mbu = read / itl_s / machine["bandwidth"]
        rows.append(row("mbu", subject, "speed", mbu, conditions=where, context=note))
    if facts["multiplied"]:
        mfu = 2 * facts["multiplied"] * prefill_tok_s / machine["rate"]
        note = context | {"rate": machine["rate"]}
        rows.append(row("mfu", subject, "speed", mfu, conditions=where, context=note))
    return rows


def _skipped_rows(subject: Subject, point: Point, shared: dict[str, Any], context: dict[str, Any]) -> list[Row]:
    where = {**shared, **dataclasses.asdict(point)}
    return [row(metric, subject, "speed", None, conditions=where, context=context) for metric in POINT_METRICS]


def _peak_row(
    subject: Subject, samples: Sequence[Sample], run: Sequence[Point], shared: dict[str, Any], context: dict[str, Any]
) -> Row:
    """The highest memory of the workers, over the points that were run."""
    peaks = [sample.peak_bytes for sample in samples]
    notes = {
        "covers": _COVERS, "spread": "min–max over processes; the value is the highest",
        "before_load_bytes": max(sample.loaded.before_load_bytes for sample in samples),
    }  # fmt: skip
    return row("peak_memory_bytes", subject, "speed", max(peaks), low=min(peaks), high=max(peaks), n=len(peaks),
               conditions={**shared, "grid": ", ".join(map(str, run))}, context=context | notes)  # fmt: skip


def _spread(
    metric: str, subject: Subject, values: list[float], conditions: dict[str, Any], context: dict[str, Any]
) -> Row:
    return row(metric, subject, "speed", statistics.median(values), low=min(values), high=max(values),
               n=len(values), conditions=conditions, context=context)  # fmt: skip


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile, by straight lines between the sorted values (numpy's default)."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
