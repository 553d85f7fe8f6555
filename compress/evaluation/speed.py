"""How fast and how large when run: base and artifact in turn, on the machine at hand.

The idea: a speed is a number only beside its conditions and its spread. So every point of a grid over batch
and context gets its own rows, prefill and decode apart (llama-bench's pp and tg); each subject runs in
a fresh process, so that neither inherits the other's memory, caches or threads; and the subjects take turns
(base, artifact, base, artifact), so that a machine that grows slower in the meantime slows both. The figure
is the median, its range stands in `low` and `high`, and warm-ups are dropped and their number recorded.

What the times cover: `ttft_s` is one prefill pass and the choice of the first token, without tokenising or a
queue. `output` counts the decode passes after it. `load_s` is opening the folder and the first forward pass
(by the end of which compressed weights are decompressed), with the files' pages already in memory.

Other work on the machine ruins a speed. It cannot be kept away from here, so it is recorded: the load average
before the run, and `cpu_share`, the least share of its threads' time that a worker got (near 1 when alone).

Left out: energy, throughput under a load of requests, thread pinning.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import CompressError, nearest
from compress.evaluation import memory
from compress.evaluation.metrics import Row, Subject, row
from compress.models.files import weight_files
from compress.runtimes import RUNTIMES
from compress.tables import resolve
from compress.workers import call, serve

if TYPE_CHECKING:
    from compress.runtimes.base import Runtime

Clock = Callable[[], float]
ROUNDS = 2
WARM_UP_STEPS = 2
POINT_METRICS = ("prefill_tok_s", "decode_tok_s", "ttft_s", "itl_s")
_COVERS = "resident high-water mark of the worker: interpreter, libraries, mapped weights, cache, activations"


@dataclass(frozen=True)
class Point:
    """A place in the grid: `batch` prompts of `context` tokens, then `output` decode passes."""

    batch: int
    context: int
    output: int

    def __str__(self) -> str:
        return f"{self.batch}×{self.context}+{self.output}"


@dataclass(frozen=True)
class PointTimes:
    """Seconds at one point: a prefill and a list of decode passes for each repeat."""

    point: Point
    prefill_s: list[float]
    steps_s: list[list[float]]


@dataclass(frozen=True)
class Sample:
    """What one worker measured. Seconds and bytes; `cpu_share`: what it got of its threads' time."""

    device: str
    opening_s: float
    first_forward_s: float
    page_cache: str
    before_load_bytes: int
    peak_bytes: int
    cpu_share: float
    versions: dict[str, str]
    points: list[PointTimes]


DEFAULT_GRID: list[Point] = [Point(1, 128, 16), Point(4, 128, 16), Point(1, 512, 16)]


def measure(
    base: Path | None,
    artifact: Path,
    *,
    grid: Sequence[Point] = DEFAULT_GRID,
    threads: int,
    repeats: int = 3,
    dtype: str = "bfloat16",
    runtime: str = "hf",
    on_progress: Callable[[str, float], None] | None = None,
) -> list[Row]:
    """Measure both checkpoint folders, or the artifact's alone, and return their rows, task "speed".

    Each subject gets at least `repeats` repeats a point, shared equally among its `ROUNDS` workers.
    `on_progress` is told what runs now and the share that is done (0 to 1). A point longer than the model's
    positions is not run: its rows have the value None and say why in `context["skipped"]`.

    Raises:
        CompressError: an impossible request, a folder that is no checkpoint, or a worker that died (with the
            subject and the worker's last words).
    """
    _check_request(grid, threads, repeats, runtime)
    subjects: list[tuple[Subject, Path]] = [("base", base)] if base else []
    subjects.append(("artifact", artifact))
    facts = {subject: _model_facts(path) for subject, path in subjects}
    skipped = {point: why for point in grid if (why := _why_skipped(point, facts))}
    kept = [point for point in grid if point not in skipped]
    request = {
        "runtime": runtime, "threads": threads, "dtype": dtype, "repeats": math.ceil(repeats / ROUNDS),
        "points": [dataclasses.asdict(point) for point in kept],
        "prompts": draw_prompts(kept, min(fact["vocab_size"] for fact in facts.values())),
    }  # fmt: skip
    context = {"load_average": list(os.getloadavg()), "time": _now(), "warm_ups": ROUNDS}
    samples: dict[Subject, list[Sample]] = {subject: [] for subject, _ in subjects}
    turns = [(index, subject, path) for index in range(ROUNDS) for subject, path in subjects]
    for done, (index, subject, path) in enumerate(turns):
        if on_progress:
            on_progress(f"speed: {subject}, round {index + 1} of {ROUNDS}", done / len(turns))
        samples[subject].append(_run_worker(subject, {**request, "path": str(path)}))
    if on_progress:
        on_progress("speed: done", 1.0)
    conditions = {"runtime": runtime, "threads": threads, "dtype": dtype, "hardware": memory.cpu_name()}
    rows: list[Row] = []
    for subject, _ in subjects:
        noted = {**context, "weights": _weights_note(facts[subject], runtime, dtype)}
        rows += summarize(subject, samples[subject], conditions, noted, skipped)
    return rows


def summarize(
    subject: Subject,
    samples: Sequence[Sample],
    conditions: dict[str, Any],
    context: dict[str, Any],
    skipped: dict[Point, str] | None = None,
) -> list[Row]:
    """The rows of one subject from its workers' samples; pure.

    Args:
        conditions: runtime, threads, dtype, hardware; the samples add device and versions, the points theirs.
        context: what is merely of interest, copied into every row.
        skipped: points that were not run, and why.
    """
    assert samples
    assert all(len(sample.points) == len(samples[0].points) for sample in samples)
    shared = {**conditions, "device": samples[0].device, **samples[0].versions}
    context = {**context, "cpu_share": min(sample.cpu_share for sample in samples)}
    loads = [sample.opening_s + sample.first_forward_s for sample in samples]
    caches = sorted({sample.page_cache for sample in samples})
    load_notes = {
        "spread": "min–max over processes",
        "opening_s": statistics.median(sample.opening_s for sample in samples),
        "first_forward_s": statistics.median(sample.first_forward_s for sample in samples),
    }
    rows = [_spread("load_s", subject, loads, {**shared, "page_cache": "/".join(caches)}, context | load_notes)]
    for times in zip(*(sample.points for sample in samples), strict=True):
        rows += _point_rows(subject, times, shared, context)
    for point, why in (skipped or {}).items():
        where = {**shared, **dataclasses.asdict(point)}
        rows += [
            row(metric, subject, "speed", None, conditions=where, context=context | {"skipped": why})
            for metric in POINT_METRICS
        ]
    peaks = [sample.peak_bytes for sample in samples]
    grid = ", ".join(str(times.point) for times in samples[0].points)
    peak_notes = {
        "covers": _COVERS, "spread": "min–max over processes; the value is the highest",
        "before_load_bytes": max(sample.before_load_bytes for sample in samples),
    }  # fmt: skip
    peak = row("peak_memory_bytes", subject, "speed", max(peaks), low=min(peaks), high=max(peaks),
               n=len(peaks), conditions={**shared, "grid": grid}, context=context | peak_notes)  # fmt: skip
    return [*rows, peak]


def _point_rows(
    subject: Subject, parts: Sequence[PointTimes], shared: dict[str, Any], context: dict[str, Any]
) -> list[Row]:
    """The four rows of one point, its repeats pooled over the workers."""
    point = parts[0].point
    where = {**shared, **dataclasses.asdict(point)}
    prefills = [seconds for part in parts for seconds in part.prefill_s]
    runs = [run for part in parts for run in part.steps_s]
    steps = [seconds for run in runs for seconds in run]
    note = context | {"spread": "min–max over repeats"}
    prefill_tok_s = [point.batch * point.context / seconds for seconds in prefills]
    decode_tok_s = [point.batch * len(run) / sum(run) for run in runs]
    return [
        _spread("prefill_tok_s", subject, prefill_tok_s, where, note),
        _spread("decode_tok_s", subject, decode_tok_s, where, note),
        _spread("ttft_s", subject, prefills, where, note),
        row("itl_s", subject, "speed", statistics.median(steps), low=percentile(steps, 10),
            high=percentile(steps, 90), n=len(steps), conditions=where,
            context=context | {"spread": "p10–p90 over steps"}),
    ]  # fmt: skip


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


def draw_prompts(grid: Sequence[Point], vocab_size: int, seed: int = 0) -> list[list[list[int]]]:
    """Token ids `[point][batch][context]` below `vocab_size`, the same for everybody with this seed."""
    source = random.Random(seed)
    return [
        [[source.randrange(vocab_size) for _ in range(point.context)] for _ in range(point.batch)] for point in grid
    ]


def take_sample(runtime: "Runtime", request: dict[str, Any], clock: Clock) -> Sample:
    """Load, warm up and time every point of the request with this runtime and this clock (seconds)."""
    import torch

    path = Path(request["path"])
    runtime.prepare(path)
    page_cache = _read_through(path)
    before_load_bytes = memory.peak_rss_bytes()
    start, cpu_start = clock(), time.process_time()
    runtime.load(path, threads=request["threads"], dtype=request["dtype"])
    opened = clock()
    runtime.prefill(torch.zeros(1, 1, dtype=torch.int64))
    first = clock()
    points = [
        _time_point(runtime, Point(**point), torch.tensor(prompts), request["repeats"], clock)
        for point, prompts in zip(request["points"], request["prompts"], strict=True)
    ]
    cpu_share = (time.process_time() - cpu_start) / max(clock() - start, 1e-9) / request["threads"]
    peak_bytes = memory.peak_rss_bytes()
    runtime.unload()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return Sample(device=runtime.device, opening_s=opened - start, first_forward_s=first - opened,
                  page_cache=page_cache, before_load_bytes=before_load_bytes, peak_bytes=peak_bytes,
                  cpu_share=cpu_share, versions=versions, points=points)  # fmt: skip


def _time_point(runtime: "Runtime", point: Point, tokens_BT: Any, repeats: int, clock: Clock) -> PointTimes:
    # The warm-up lets the libraries choose kernels and buffers for these shapes; its times are dropped.
    runtime.prefill(tokens_BT)
    runtime.decode(min(WARM_UP_STEPS, point.output))
    prefill_s: list[float] = []
    steps_s: list[list[float]] = []
    for _ in range(repeats):
        marks = [clock()]
        runtime.prefill(tokens_BT)
        marks.append(clock())
        for _ in range(point.output):
            runtime.decode(1)
            marks.append(clock())
        gaps = [after - before for before, after in itertools.pairwise(marks)]
        prefill_s.append(gaps[0])
        steps_s.append(gaps[1:])
    return PointTimes(point, prefill_s, steps_s)


def _read_through(path: Path) -> str:
    """Read the weights once, so that loading is timed from memory in every round; says what it did."""
    files = weight_files(path)
    if sum(file.stat().st_size for file in files) > memory.available_memory_bytes() // 2:
        return "as found"
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    return "warm"


def _run_worker(subject: Subject, request: dict[str, Any]) -> Sample:
    """One fresh process; its sample."""
    what = f"measuring the speed of the {subject}"
    return _parse_sample(call("compress.evaluation.speed", request, what=what, where=request["path"]))


def _parse_sample(data: dict[str, Any]) -> Sample:
    points = [PointTimes(Point(**item["point"]), item["prefill_s"], item["steps_s"]) for item in data["points"]]
    return Sample(**{**data, "points": points})


def _check_request(grid: Sequence[Point], threads: int, repeats: int, runtime: str) -> None:
    if runtime not in RUNTIMES:  # looked up only: the worker imports it, this process need not
        raise CompressError(f"unknown runtime {runtime!r}; {nearest(runtime, RUNTIMES)}")
    if threads < 1 or repeats < 1:
        raise CompressError(f"threads and repeats must be at least 1, not {threads} and {repeats}")
    for point in grid:
        if min(point.batch, point.context, point.output) < 1:
            raise CompressError(f"batch, context and output must be at least 1, not {point}")
    if len(set(grid)) != len(grid):
        raise CompressError("The same point stands twice in the speed grid")


def _model_facts(path: Path) -> dict[str, Any]:
    """From config.json: vocab_size, positions (or None), and how the weights are stored (or None)."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompressError(f"Cannot read the model's configuration: {error}", where=str(file),
                            hint="give the folder of a model or of an artifact") from error  # fmt: skip
    text = {**config, **config.get("text_config", {})}
    if not isinstance(text.get("vocab_size"), int):
        raise CompressError("The configuration has no vocab_size", where=str(file))
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
    )  # the others are the field's older names
    positions = next((text[name] for name in names if isinstance(text.get(name), int)), None)
    quantization = config.get("quantization_config") or {}
    return {
        "vocab_size": text["vocab_size"], "positions": positions,
        "quantization": quantization.get("quant_method"),
    }  # fmt: skip


def _why_skipped(point: Point, facts: Mapping[Subject, dict[str, Any]]) -> str | None:
    limits = [fact["positions"] for fact in facts.values() if fact["positions"] is not None]
    need = point.context + point.output
    if limits and need > min(limits):
        return f"context + output is {need} tokens, the model has {min(limits)} positions"
    return None


def _weights_note(facts: dict[str, Any], runtime: str, dtype: str) -> str:
    """How the weights are held while they run: says when a speed is not that of packed weights."""
    stored = facts["quantization"]
    if runtime == "hf" and stored == "compressed-tensors":
        return f"{stored}, decompressed to {dtype} in memory"
    return stored or dtype


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The worker: a sample as plain data."""
    # Whatever a library prints must not stand among the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        runtime = resolve(RUNTIMES, request["runtime"], kind="runtime")()
        return dataclasses.asdict(take_sample(runtime, request, time.perf_counter))


if __name__ == "__main__":
    raise SystemExit(serve(answer))
