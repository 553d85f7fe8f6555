"""The speed harness: arithmetic by hand with a clock of our own, the worker once for real on a tiny model."""

import dataclasses
import gc
import mmap
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from compress.errors import CompressError
from compress.evaluation import machine, memory, speed, speed_rows, timing
from compress.evaluation.energy import WHY_NOT, Meter
from compress.evaluation.metrics import Row
from compress.evaluation.timing import Loaded, Point, PointTimes, Sample
from compress.runtimes.base import DoesNotFit, Facts


class FakeRuntime:
    """Latencies known to the second: load 2, prefill 1 a token, steps 0.5, 0.6, 0.7 …; batches of 9 do not fit."""

    device = "cpu"

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def prepare(self, path: Path) -> None:
        self.now += 100  # must not be counted

    def load(self, path: Path, *, threads: int, dtype: str = "bfloat16", expand: bool = False) -> None:
        self.now += 2

    def timed(self, tokens_BT: Tensor, n: int, clock: Any) -> list[float]:
        if len(tokens_BT) == 9:
            raise DoesNotFit("it needs 9 GB")
        self.calls.append(f"{tuple(tokens_BT.shape)} + {n}")
        marks = [self.now, self.now + tokens_BT.numel()]
        for step in range(n):
            marks.append(marks[-1] + 0.5 + 0.1 * step)
        self.now = marks[-1]
        return marks

    def facts(self) -> Facts:
        return Facts("float3", weight_bytes=1000, read_bytes=800, peak_bytes=memory.peak_rss_bytes(),
                     kv_bytes_per_token=10, multiplied=300, versions={"fake": "1"})  # fmt: skip

    def unload(self) -> None:
        self.calls.append("unload")


def take_fake(folder: Path, *points: Point, cold: bool = False) -> tuple[Sample, FakeRuntime]:
    runtime, findings = FakeRuntime(), folder / "findings"
    findings.write_text("")
    request = {
        "path": str(folder), "threads": 1, "dtype": "bfloat16", "repeats": 2, "cold": cold,
        "points": [dataclasses.asdict(point) for point in points], "prompts": speed.draw_prompts(points, 9),
    }  # fmt: skip

    def say(kind: str, found: Any) -> None:
        timing.write(findings, kind, found)

    timing.take_sample(runtime, request, runtime.clock, say)  # type: ignore[arg-type]  # of what is timed only
    sample = timing.gather(findings)
    assert sample is not None
    return sample, runtime


def test_sample_times_what_it_says(tmp_path: Path) -> None:
    sample, runtime = take_fake(tmp_path, Point(2, 4, 3), Point(9, 1, 1), Point(1, 1, 1))
    assert (sample.loaded.opening_s, sample.loaded.first_forward_s) == (2.0, 1.0)
    times, refused, last = sample.points
    assert times.prefill_s == pytest.approx([8, 8])
    assert times.steps_s == [pytest.approx([0.5, 0.6, 0.7])] * 2
    assert refused.skipped == "does not fit in memory here: it needs 9 GB"
    assert last.prefill_s == [1, 1]
    warm_up = ["(1, 1) + 0", "(2, 4) + 2"]
    assert runtime.calls == [*warm_up, *["(2, 4) + 3"] * 2, "(1, 1) + 1", *["(1, 1) + 1"] * 2, "unload"]
    assert 0 < sample.loaded.before_load_bytes <= sample.peak_bytes
    assert sample.loaded.facts["versions"] == {"fake": "1"}


def test_what_a_dead_worker_found_is_read(tmp_path: Path) -> None:
    findings = tmp_path / "findings"
    findings.write_text("")
    assert timing.gather(findings) is None
    sample, _ = take_fake(tmp_path, Point(2, 4, 3))
    with findings.open("a") as file:
        file.write('["point", {"point": {"ba')  # cut off
    assert timing.gather(findings) == sample


def make_sample(prefill_s: list[float], steps_s: list[list[float]], peak: int, opening: float, cache: str) -> Sample:
    times = PointTimes(Point(2, 100, 2), prefill_s, steps_s, joules=opening)
    facts = Facts("float3", weight_bytes=1000, read_bytes=800, peak_bytes=9, kv_bytes_per_token=10, multiplied=300,
                  versions={"torch": "2"})  # fmt: skip
    loaded = Loaded("cpu", opening, 1.0, cache, before_load_bytes=5, facts=dataclasses.asdict(facts))
    return Sample(loaded, [times, PointTimes(Point(3, 1, 2), skipped="too large")], peak, cpu_share=opening / 10)


def summarized(samples: list[Sample], given: dict[Point, str], *points: Point) -> list[Row]:
    machine = {"bandwidth": 10_000.0, "rate": 100_000.0}
    conditions = {"runtime": "hf", "threads": 2}
    return speed_rows.summarize("artifact", samples, points, machine, conditions, {"time": "now"}, given)


def test_summarize_by_hand() -> None:
    samples = [
        make_sample([2.0, 4.0], [[0.1, 0.3], [0.2, 0.2]], peak=100, opening=3.0, cache="cold"),
        make_sample([5.0], [[0.5, 0.5]], peak=80, opening=1.0, cache="warm"),
    ]
    rows = summarized(samples, {Point(1, 999, 1): "too long"}, Point(2, 100, 2), Point(3, 1, 2), Point(1, 999, 1))
    assert all(row["subject"] == "artifact" and row["task"] == "speed" for row in rows)
    found = {row["metric"]: row for row in rows if row["value"] is not None}

    def numbers(metric: str) -> tuple[float, float, float, int]:
        row = found[metric]
        return row["value"], row["low"], row["high"], row["n"]

    assert numbers("prefill_tok_s") == pytest.approx((50, 40, 100, 3))  # 200 tokens in 2, 4, 5 s
    assert numbers("decode_tok_s") == pytest.approx((10, 4, 10, 3))  # 4 tokens in 0.4, 0.4, 1 s
    assert numbers("ttft_s") == pytest.approx((4, 2, 5, 3))
    assert numbers("itl_s") == pytest.approx((0.25, 0.15, 0.5, 6))  # 0.1 0.2 0.2 0.3 0.5 0.5
    assert numbers("energy_j") == pytest.approx((2, 1, 3, 2))
    for metric, value in (("ttft_p90_s", 4.8), ("ttft_p99_s", 4.98), ("itl_p90_s", 0.5), ("itl_p99_s", 0.5)):
        assert found[metric]["value"] == pytest.approx(value)
    loads = {row["conditions"]["page_cache"]: row["value"] for row in rows if row["metric"] == "load_s"}
    assert loads == {"cold": 4, "warm": 2}
    assert numbers("peak_memory_bytes") == (100, 80, 100, 2)
    # A pass reads 800 bytes of weights and 10 for each of 2 × (100 + 1) tokens: 2820, in 0.25 s, of 10,000 a second.
    assert found["mbu"]["value"] == pytest.approx(2820 / 0.25 / 10_000)
    assert found["ceiling_tok_s"]["value"] == pytest.approx(2 * 10_000 / 2820)
    assert found["mfu"]["value"] == pytest.approx(2 * 300 * 50 / 100_000)
    assert (found["kv_cache_bytes"]["value"], found["weight_bytes"]["value"]) == (2 * 102 * 10, 1000)
    point = {"batch": 2, "context": 100, "output": 2}
    assert found["itl_s"]["conditions"] == {"runtime": "hf", "threads": 2, "device": "cpu", "torch": "2", **point}
    assert found["itl_s"]["context"]["spread"] == "p10–p90 over steps"
    assert (found["load_s"]["context"]["cpu_share"], found["itl_s"]["context"]["weights"]) == (0.1, "float3")
    assert found["peak_memory_bytes"]["conditions"]["grid"] == "2×100+2"
    assert "mapped weights" in found["peak_memory_bytes"]["context"]["covers"]
    empty = [row for row in rows if row["value"] is None]
    assert [row["metric"] for row in empty] == list(speed_rows.POINT_METRICS) * 2
    assert [row["context"]["skipped"] for row in empty] == ["too large"] * 4 + ["too long"] * 4


def test_what_no_machine_tells_is_not_measured() -> None:
    sample = make_sample([2.0], [[0.1, 0.3]], peak=100, opening=3.0, cache="warm")
    quiet = dataclasses.replace(sample, points=[dataclasses.replace(sample.points[0], joules=None)])
    (energy,) = (row for row in summarized([quiet], {}, Point(2, 100, 2)) if row["metric"] == "energy_j")
    assert energy["value"] is None
    assert energy["context"]["absent"] == WHY_NOT


def test_energy_counters_wrap_around(tmp_path: Path) -> None:
    package = tmp_path / "intel-rapl:0"
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package, counted with it
    package.mkdir()
    counter = package / "energy_uj"
    (package / "max_energy_range_uj").write_text("10000000")
    counter.write_text("9000000")
    meter = Meter(tmp_path)
    counter.write_text("9500000")
    assert meter.joules() == pytest.approx(0.5)
    counter.write_text("2000000")
    assert meter.joules() == pytest.approx(3)
    counter.unlink()
    assert meter.joules() is None
    assert Meter(tmp_path / "none").joules() is None


def test_the_machines_limits_are_of_a_plausible_size() -> None:
    found = machine.limits(1)
    assert 1e8 < found["bandwidth"] < 1e13
    assert 1e8 < found["rate"] < 1e16


def test_percentile() -> None:
    assert speed_rows.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert speed_rows.percentile([0.0, 1.0], 90) == pytest.approx(0.9)
    assert speed_rows.percentile([7.0], 10) == 7.0


def test_prompts_are_seeded_and_in_range() -> None:
    grid = [Point(2, 5, 1), Point(1, 3, 1)]
    prompts = speed.draw_prompts(grid, 10)
    assert prompts == speed.draw_prompts(grid, 10) != speed.draw_prompts(grid, 10, seed=1)
    assert [[len(tokens) for tokens in batch] for batch in prompts] == [[5, 5], [3]]
    assert all(0 <= token < 10 for batch in prompts for tokens in batch for token in tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Workers that die at batches of 7, and before loading what is called "gone"; the requests they got."""
    asked: list[dict[str, Any]] = []

    def call(module: str, request: dict[str, Any], *, what: str, where: str, progress: Any) -> None:
        asked.append({**request, "what": what})
        findings = Path(request["findings"])
        runtime = FakeRuntime()
        cut = [point["batch"] for point in request["points"]].index(7) if _has(request, 7) else None
        kept = {**request, "points": request["points"][:cut], "prompts": request["prompts"][:cut]}
        if where.endswith("gone"):
            raise CompressError("it is gone")
        timing.take_sample(runtime, kept, runtime.clock, lambda *found: timing.write(findings, *found))  # type: ignore[arg-type]
        progress(1, 2)
        if cut is not None:
            raise CompressError("killed")

    monkeypatch.setattr(speed, "call", call)
    monkeypatch.setattr(speed, "limits", lambda threads: {"bandwidth": 1e9, "rate": 1e9})
    return asked


def _has(request: dict[str, Any], batch: int) -> bool:
    return any(point["batch"] == batch for point in request["points"])


def test_subjects_take_turns_cold_then_warm(folder: Path, workers: list[dict[str, Any]]) -> None:
    heard: list[tuple[str, float]] = []
    rows = speed.measure(folder, folder, grid=[Point(2, 5, 2), Point(2, 100, 2)], threads=1, runtime="hf",
                         on_progress=lambda text, share: heard.append((text, share)))  # fmt: skip
    assert [asked["what"].split()[-1] for asked in workers] == ["base", "artifact"] * 2
    assert [asked["cold"] for asked in workers] == [True, True, False, False]
    assert all(asked["prompts"] == workers[0]["prompts"] and asked["repeats"] == 2 for asked in workers)
    assert [share for _, share in heard] == [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1]
    empty = [row for row in rows if row["value"] is None and row["metric"] != "energy_j"]
    assert {(row["subject"], row["metric"]) for row in empty} == {
        (subject, metric) for subject in ("base", "artifact") for metric in speed_rows.POINT_METRICS
    }
    assert "102 tokens, the model has 64 positions" in empty[0]["context"]["skipped"]
    (found,) = (row for row in rows if (row["metric"], row["subject"]) == ("decode_tok_s", "base") and row["value"])
    assert found["value"] == pytest.approx(2 * 2 / 1.1)  # two steps of 0.5 and 0.6 s


def test_a_worker_that_dies_is_recorded_and_the_rest_goes_on(folder: Path, workers: list[dict[str, Any]]) -> None:
    grid = [Point(2, 5, 2), Point(7, 5, 2), Point(3, 5, 2)]
    rows = speed.measure(None, folder, grid=grid, threads=1, runtime="hf")
    batches = [[point["batch"] for point in asked["points"]] for asked in workers]
    assert batches == [[2, 7, 3], [3], [2, 3]]  # the second round knows
    found = {row["conditions"]["batch"]: row for row in rows if row["metric"] == "decode_tok_s"}
    assert found[7]["context"]["skipped"] == "killed"
    assert all(found[batch]["value"] > 0 for batch in (2, 3))


def test_a_worker_that_never_loads_stops_the_run(tmp_path: Path, folder: Path, workers: list[dict[str, Any]]) -> None:
    shutil.copytree(folder, tmp_path / "gone")
    with pytest.raises(CompressError, match="gone"):
        speed.measure(None, tmp_path / "gone", threads=1, runtime="hf", grid=[Point(1, 2, 2)])


def test_the_worker_for_real(folder: Path) -> None:
    """One fresh process end to end: request in, findings out, rows from them."""
    point = Point(2, 8, 3)
    request = {
        "runtime": "hf", "path": str(folder), "threads": 1, "dtype": "float32", "repeats": 2, "cold": False,
        "points": [dataclasses.asdict(point)], "prompts": speed.draw_prompts([point], 64),
    }  # fmt: skip
    sample, died = speed._run_worker("base", request, lambda share: None)
    assert died is None
    assert sample.loaded.page_cache == "warm"
    assert sample.points[0].point == point
    assert [len(run) for run in sample.points[0].steps_s] == [3, 3]
    facts = sample.loaded.facts
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, channels, float32
    assert facts["multiplied"] == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    rows = summarized([sample], {}, point)
    assert {row["metric"] for row in rows} > {"load_s", "peak_memory_bytes", "mbu", "mfu", *speed_rows.POINT_METRICS}
    assert all(row["value"] > 0 for row in rows if row["metric"] != "energy_j")


def test_weights_can_be_dropped_from_memory(folder: Path) -> None:
    """Whether the kernel forgets pages is its own choice; what it said must be what `_is_cached` sees."""
    assert timing._read_through(folder) == "warm"
    with (folder / "model.safetensors").open("rb") as file:
        assert timing._is_cached(file.fileno())
    said = timing._drop(folder)
    with (folder / "model.safetensors").open("rb") as file:
        assert (said == "cold") == (not timing._is_cached(file.fileno()))


def test_what_the_worker_refuses_is_our_error(folder: Path) -> None:
    request = {"runtime": "hf", "path": str(folder / "gone"), "threads": 1, "dtype": "float32", "cold": False,
               "repeats": 1, "points": [], "prompts": []}  # fmt: skip
    with pytest.raises(CompressError, match=r"config\.json is missing"):
        speed._run_worker("artifact", request, lambda share: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": 0}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"grid": [Point(0, 1, 1)]}, "at least 1"),
        ({"grid": [Point(1, 1, 1), Point(1, 1, 1)]}, "twice"),
        ({"runtime": "hff"}, "'hf'"),
    ],
)
def test_impossible_requests(folder: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(CompressError, match=words):
        speed.measure(folder, folder, **{"threads": 1, **change})  # type: ignore[arg-type]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="configuration"):
        speed.measure(tmp_path, tmp_path, threads=1)


def test_peak_anonymous_sees_a_passing_allocation() -> None:
    # A mapping of its own: a block from the heap may lie in memory that is resident already.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    gc.collect()  # what earlier tests left must not be freed in between
    with memory.PeakAnonymous(interval_s=0.001) as watch, mmap.mmap(-1, 128 << 20, flags=private) as block:
        for page in range(0, 128 << 20, mmap.PAGESIZE):
            block[page] = 1
        watch._sample()  # so that the test does not depend on the thread's luck
    assert watch.peak_bytes - watch.before_bytes >= 60 << 20
    assert watch.source in ("RssAnon", "rss (psutil)")


def test_peak_rss_is_not_the_parents() -> None:
    """A child of a large process must report its own peak: `ru_maxrss` would survive fork and exec."""
    block = bytearray(256 << 20)
    code = "from compress.evaluation.memory import peak_rss_bytes as p; import sys; sys.stdout.write(str(p()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(speed.__file__).parents[2])  # fmt: skip
    assert int(done.stdout) < len(block)
    assert memory.peak_rss_bytes() >= len(block)
    assert memory.current_rss_bytes() > 0


def test_what_the_machine_has_left(tmp_path: Path) -> None:
    assert memory.free_disk_bytes(tmp_path / "not" / "yet") > 0
    assert memory.available_memory_bytes() > 0
    assert memory.cgroup_left_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert memory.cgroup_left_bytes(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cgroup_left_bytes(tmp_path) is None
