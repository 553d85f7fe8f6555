"""How fast and how large when run: base and artifact in turn, on the machine at hand.

The idea: a speed is a number only beside its conditions and its spread. So every point of a grid over batch
and context gets its own rows, prefill and decode apart (llama-bench's pp and tg); each subject runs in
a fresh process, so that neither inherits the other's memory, caches or threads; and the subjects take turns
(base, artifact, base, artifact), so that a machine that grows slower in the meantime slows both. In the first round
the weights' pages are dropped before loading (a cold start), in the second they are read. `timing` is the worker's
side, `speed_rows` what its samples come to.

A worker that dies at a point is recorded there, and another goes on with the next: nothing measured is lost.

Left out: throughput under a load of requests, thread pinning.
"""

import dataclasses
import datetime
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.artifact import open_artifact
from compress.errors import CompressError, nearest
from compress.evaluation import memory
from compress.evaluation.machine import limits
from compress.evaluation.metrics import Row, Subject
from compress.evaluation.speed_rows import summarize
from compress.evaluation.timing import Point, Sample, gather
from compress.runtimes import RUNTIMES
from compress.workers import call

ROUNDS = 2
DEFAULT_GRID: list[Point] = [Point(1, 128, 16), Point(4, 128, 16), Point(1, 512, 16)]
Given = dict[Point, str]  # points that were given up, and why


def measure(
    base: Path | None,
    artifact: Path,
    *,
    grid: Sequence[Point] = DEFAULT_GRID,
    threads: int,
    repeats: int = 3,
    dtype: str = "bfloat16",
    runtime: str | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> list[Row]:
    """Measure both checkpoint folders, or the artifact's alone, and return their rows, task "speed".

    Each subject gets at least `repeats` repeats a point, shared equally among its `ROUNDS` workers.
    `on_progress` is told what runs now and the share that is done (0 to 1). A point longer than the model's
    positions, one that does not fit in memory and one at which a worker dies have rows with the value None, which say
    why in `context["skipped"]`.

    Args:
        runtime: of `RUNTIMES`; by default `default_runtime`.

    Raises:
        CompressError: an impossible request, a folder that is no checkpoint, or a worker that died before it had
            measured anything (with the subject and the worker's last words).
    """
    subjects: list[tuple[Subject, Path]] = [("base", base)] if base else []
    subjects.append(("artifact", artifact))
    facts = {subject: _model_facts(path) for subject, path in subjects}
    runtime = runtime or default_runtime([path for _, path in subjects])
    _check_request(grid, threads, repeats, runtime)
    given: dict[Subject, Given] = {subject: {} for subject, _ in subjects}
    for point in grid:
        if why := _why_skipped(point, facts):
            for gave in given.values():
                gave[point] = why
    request = {
        "runtime": runtime, "threads": threads, "dtype": dtype, "repeats": math.ceil(repeats / ROUNDS),
        "prompts": draw_prompts(grid, min(fact["vocab_size"] for fact in facts.values())),
    }  # fmt: skip
    context = {"load_average": list(os.getloadavg()), "time": _now(), "warm_ups": ROUNDS}
    machine = limits(threads)
    samples: dict[Subject, list[Sample]] = {subject: [] for subject, _ in subjects}
    turns = [(index, subject, path) for index in range(ROUNDS) for subject, path in subjects]
    for turn, (index, subject, path) in enumerate(turns):
        what = f"speed: {subject}, round {index + 1} of {ROUNDS}"

        def say(share: float, turn: int = turn, what: str = what) -> None:
            if on_progress:
                on_progress(what, (turn + share) / len(turns))

        asked = {**request, "path": str(path), "cold": index == 0}
        samples[subject] += _take_turn(subject, asked, grid, given[subject], say, any(samples[subject]))
    if on_progress:
        on_progress("speed: done", 1.0)
    conditions = {"runtime": runtime, "threads": threads, "dtype": dtype, "hardware": memory.cpu_name()}
    rows: list[Row] = []
    for subject, _ in subjects:
        rows += summarize(subject, samples[subject], grid, machine, conditions, context, given[subject])
    return rows


def default_runtime(folders: Sequence[Path]) -> str:
    """`packed` where it reads all of these checkpoints, else `hf`."""
    try:
        for folder in folders:
            open_artifact(folder)
    except CompressError:
        return "hf"
    return "packed"


def _take_turn(
    subject: Subject,
    request: dict[str, Any],
    grid: Sequence[Point],
    given: Given,
    say: Callable[[float], None],
    known: bool,
) -> list[Sample]:
    """A subject's points in a fresh process; where that dies at one, the rest in another.

    Args:
        given: the point at which a process died goes in here.
        known: the subject was measured before, so that a process that does not even load is no reason to stop.
    """
    samples: list[Sample] = []
    prompts = dict(zip(grid, request["prompts"], strict=True))
    left = [point for point in grid if point not in given]
    while True:
        asked = {**request, "points": [dataclasses.asdict(p) for p in left], "prompts": [prompts[p] for p in left]}
        try:
            sample, died = _run_worker(subject, asked, say)
        except CompressError as error:
            if not (known or samples):
                raise
            given.update({point: error.what for point in left})
            return samples
        samples.append(sample)
        done = {times.point for times in sample.points}
        lost = next((point for point in left if point not in done), None)
        if died is None or lost is None:
            return samples
        given[lost] = died.what
        left = left[left.index(lost) + 1 :]
        if not left:
            return samples


def _run_worker(
    subject: Subject, request: dict[str, Any], say: Callable[[float], None]
) -> tuple[Sample, CompressError | None]:
    """One fresh process: what it measured, and how it died if it did.

    Raises:
        CompressError: it refused, or died before the model was loaded.
    """
    died = None
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder) / "findings"
        findings.touch()
        say(0)
        try:
            call("compress.evaluation.timing", {**request, "findings": str(findings)},
                 what=f"measuring the speed of the {subject}", where=request["path"],
                 progress=lambda done, total: say(done / total))  # fmt: skip
        except CompressError as error:
            died = error
        sample = gather(findings)
    if sample is None:
        assert died is not None, "a worker that ends well has loaded"
        raise died
    return sample, died


def draw_prompts(grid: Sequence[Point], vocab_size: int, seed: int = 0) -> list[list[list[int]]]:
    """Token ids `[point][batch][context]` below `vocab_size`, the same for everybody with this seed."""
    source = random.Random(seed)
    return [
        [[source.randrange(vocab_size) for _ in range(point.context)] for _ in range(point.batch)] for point in grid
    ]


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
    """From config.json: vocab_size, and positions or None."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompressError(f"Cannot read the model's configuration: {error}", where=str(file),
                            hint="give the folder of a model or of an artifact") from error  # fmt: skip
    text = {**config, **config.get("text_config", {})}
    if not isinstance(text.get("vocab_size"), int):
        raise CompressError("The configuration has no vocab_size", where=str(file))
    names = ("max_position_embeddings", "n_positions", "max_seq_len")  # the others are the field's older names
    positions = next((text[name] for name in names if isinstance(text.get(name), int)), None)
    return {"vocab_size": text["vocab_size"], "positions": positions}


def _why_skipped(point: Point, facts: Mapping[Subject, dict[str, Any]]) -> str | None:
    most = [fact["positions"] for fact in facts.values() if fact["positions"] is not None]
    need = point.context + point.output
    if most and need > min(most):
        return f"context + output is {need} tokens, the model has {min(most)} positions"
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
