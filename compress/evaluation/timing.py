"""The measuring process of the speed harness: loads one model, times every point, and says each as soon as it has it.

Its findings go to a file line by line, so that those of a process that dies midway are kept.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.evaluation import memory
from compress.evaluation.energy import Meter
from compress.models.files import weight_files
from compress.runtimes import RUNTIMES
from compress.runtimes.base import DoesNotFit
from compress.tables import resolve
from compress.workers import serve, tell

if TYPE_CHECKING:
    from compress.runtimes.base import Runtime

Clock = Callable[[], float]
WARM_UP_STEPS = 2


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
    """Seconds at one point: a prefill and a list of decode passes for each repeat.

    Attributes:
        joules: of a repeat, mean; None where the machine does not tell.
        skipped: why it was not run; None where it was.
    """

    point: Point
    prefill_s: list[float] = field(default_factory=list)
    steps_s: list[list[float]] = field(default_factory=list)
    joules: float | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, seconds and bytes.

    Attributes:
        facts: `runtimes.base.Facts`, as plain data.
        page_cache: where the weights' pages were: "cold" (dropped before), "warm" (read before), or "as found".
    """

    device: str
    opening_s: float
    first_forward_s: float
    page_cache: str
    before_load_bytes: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """What one worker measured; `cpu_share`: what it got of its threads' time."""

    loaded: Loaded
    points: list[PointTimes]
    peak_bytes: int
    cpu_share: float


def take_sample(runtime: "Runtime", request: dict[str, Any], clock: Clock, say: Callable[[str, Any], None]) -> None:
    """Load, warm up and time every point of the request, with this runtime and this clock (seconds).

    Args:
        say: told a kind and a finding: "loaded" a `Loaded`, "point" a `PointTimes`, "usage" peak bytes and CPU share,
            after every point.
    """
    import torch

    path = Path(request["path"])
    runtime.prepare(path)
    page_cache = _drop(path) if request["cold"] else _read_through(path)
    before_load_bytes = memory.peak_rss_bytes()
    start, cpu_start = clock(), time.process_time()
    runtime.load(path, threads=request["threads"], dtype=request["dtype"])
    opened = clock()
    runtime.timed(torch.zeros(1, 1, dtype=torch.int64), 0, clock)
    first = clock()
    facts = dataclasses.asdict(runtime.facts())
    say("loaded", Loaded(runtime.device, opened - start, first - opened, page_cache, before_load_bytes, facts))

    def say_usage() -> None:
        share = (time.process_time() - cpu_start) / max(clock() - start, 1e-9) / request["threads"]
        say("usage", [runtime.facts().peak_bytes, share])

    say_usage()
    pairs = zip(request["points"], request["prompts"], strict=True)
    for done, (point, prompts) in enumerate(pairs, 1):
        say("point", _time_point(runtime, Point(**point), torch.tensor(prompts), request["repeats"], clock))
        say_usage()
        tell(done, len(request["points"]))
    runtime.unload()


def _time_point(runtime: "Runtime", point: Point, tokens_BT: Any, repeats: int, clock: Clock) -> PointTimes:
    # The warm-up lets the libraries choose kernels and buffers for these shapes; its times are dropped.
    prefill_s: list[float] = []
    steps_s: list[list[float]] = []
    try:
        runtime.timed(tokens_BT, min(WARM_UP_STEPS, point.output), clock)
        meter = Meter()
        for _ in range(repeats):
            marks = runtime.timed(tokens_BT, point.output, clock)
            gaps = [after - before for before, after in itertools.pairwise(marks)]
            prefill_s.append(gaps[0])
            steps_s.append(gaps[1:])
        joules = meter.joules()
    except DoesNotFit as why:
        return PointTimes(point, skipped=f"does not fit in memory here: {why}")
    return PointTimes(point, prefill_s, steps_s, None if joules is None else joules / repeats)


def _read_through(path: Path) -> str:
    """Read the weights once, so that loading is timed from memory; says what it did."""
    files = weight_files(path)
    if sum(file.stat().st_size for file in files) > memory.available_memory_bytes() // 2:
        return "as found"
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    return "warm"


def _drop(path: Path) -> str:
    """Has the kernel forget the weights' pages, so that loading is timed from the disk; says whether it did."""
    for file in weight_files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if _is_cached(descriptor):
                return "as found"
        except (AttributeError, OSError):  # no such call here
            return "as found"
        finally:
            os.close(descriptor)
    return "cold"


def _is_cached(descriptor: int) -> bool:
    """Whether the middle of a file is in memory: a read that may not wait for the disk succeeds."""
    try:
        return os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def answer(request: dict[str, Any]) -> None:
    """The worker; its findings go to the file `request["findings"]`."""

    say = functools.partial(write, Path(request["findings"]))
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints must not stand among the JSON
        take_sample(resolve(RUNTIMES, request["runtime"], kind="runtime")(), request, time.perf_counter, say)


def write(findings: Path, kind: str, found: Any) -> None:
    """Adds a finding to the file."""
    plain = dataclasses.asdict(found) if dataclasses.is_dataclass(found) and not isinstance(found, type) else found
    with findings.open("a") as file:
        file.write(json.dumps([kind, plain]) + "\n")


def gather(findings: Path) -> Sample | None:
    """The sample of what a worker said, as far as it came; None where it had not even loaded."""
    lines = [json.loads(line) for line in findings.read_text().splitlines() if line.endswith("]")]
    loaded = next((Loaded(**found) for kind, found in lines if kind == "loaded"), None)
    usage = [found for kind, found in lines if kind == "usage"]
    if loaded is None or not usage:
        return None
    points = [PointTimes(**{**found, "point": Point(**found["point"])}) for kind, found in lines if kind == "point"]
    return Sample(loaded, points, peak_bytes=usage[-1][0], cpu_share=usage[-1][1])


if __name__ == "__main__":
    raise SystemExit(serve(answer))
