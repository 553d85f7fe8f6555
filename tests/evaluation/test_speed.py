"""The speed harness: arithmetic by hand with a clock of our own, the worker once for real on a tiny model."""

import gc
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import CompressError
from compress.evaluation import memory, speed
from compress.evaluation.speed import Point, PointTimes, Sample


class FakeRuntime:
    """Latencies known to the second: load 2, prefill 1 a token, decode steps 0.5, 0.6, 0.7 …"""

    device = "cpu"

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._step = 0

    def clock(self) -> float:
        return self.now

    def prepare(self, path: Path) -> None:
        self.now += 100  # must not be counted

    def load(self, path: Path, *, threads: int, dtype: str = "bfloat16") -> None:
        self.now += 2

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        self.now += tokens_BT.numel()
        self._step = 0
        self.calls.append(f"prefill {tuple(tokens_BT.shape)}")
        return tokens_BT

    def decode(self, n: int) -> Tensor:
        for _ in range(n):
            self.now += 0.5 + 0.1 * self._step
            self._step += 1
        self.calls.append(f"decode {n}")
        return torch.zeros(1, n)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def unload(self) -> None:
        self.calls.append("unload")


def take_fake(tmp_path: Path) -> tuple[Sample, FakeRuntime]:
    runtime = FakeRuntime()
    request = {
        "path": str(tmp_path), "threads": 1, "dtype": "bfloat16", "repeats": 2,
        "points": [{"batch": 2, "context": 4, "output": 3}], "prompts": [[[1, 2, 3, 4], [5, 6, 7, 8]]],
    }  # fmt: skip
    return speed.take_sample(runtime, request, runtime.clock), runtime


def test_sample_times_what_it_says(tmp_path: Path) -> None:
    sample, runtime = take_fake(tmp_path)
    assert (sample.opening_s, sample.first_forward_s) == (2.0, 1.0)
    (times,) = sample.points
    assert times.prefill_s == pytest.approx([8, 8])
    assert times.steps_s == [pytest.approx([0.5, 0.6, 0.7])] * 2
    warm_up = ["prefill (1, 1)", "prefill (2, 4)", "decode 2"]
    assert runtime.calls == [*warm_up, *(["prefill (2, 4)"] + ["decode 1"] * 3) * 2, "unload"]
    assert 0 < sample.before_load_bytes <= sample.peak_bytes
    assert set(sample.versions) == {"torch", "transformers"}


def make_sample(prefill_s: list[float], steps_s: list[list[float]], peak: int, opening: float) -> Sample:
    times = PointTimes(Point(2, 100, 2), prefill_s, steps_s)
    return Sample(device="cpu", opening_s=opening, first_forward_s=1.0, page_cache="warm",
                  before_load_bytes=5, peak_bytes=peak, cpu_share=opening / 10, versions={"torch": "2"},
                  points=[times])  # fmt: skip


def test_summarize_by_hand() -> None:
    samples = [
        make_sample([2.0, 4.0], [[0.1, 0.3], [0.2, 0.2]], peak=100, opening=3.0),
        make_sample([5.0], [[0.5, 0.5]], peak=80, opening=1.0),
    ]
    skipped = {Point(1, 999, 1): "too long"}
    rows = speed.summarize("artifact", samples, {"runtime": "hf", "threads": 2}, {"time": "now"}, skipped)
    assert all(row["subject"] == "artifact" and row["task"] == "speed" for row in rows)
    found = {row["metric"]: row for row in rows if row["value"] is not None}

    def numbers(metric: str) -> tuple[float, float, float, int]:
        row = found[metric]
        return row["value"], row["low"], row["high"], row["n"]

    assert numbers("prefill_tok_s") == pytest.approx((50, 40, 100, 3))  # 200 tokens in 2, 4, 5 s
    assert numbers("decode_tok_s") == pytest.approx((10, 4, 10, 3))  # 4 tokens in 0.4, 0.4, 1 s
    assert numbers("ttft_s") == pytest.approx((4, 2, 5, 3))
    assert numbers("itl_s") == pytest.approx((0.25, 0.15, 0.5, 6))  # 0.1 0.2 0.2 0.3 0.5 0.5
    assert numbers("load_s") == pytest.approx((3, 2, 4, 2))
    assert numbers("peak_memory_bytes") == (100, 80, 100, 2)
    point = {"batch": 2, "context": 100, "output": 2}
    assert found["itl_s"]["conditions"] == {
        "runtime": "hf",
        "threads": 2,
        "device": "cpu",
        "torch": "2",
        **point,
    }
    assert found["itl_s"]["context"]["spread"] == "p10–p90 over steps"
    assert found["load_s"]["context"]["cpu_share"] == pytest.approx(0.1)
    assert found["peak_memory_bytes"]["conditions"]["grid"] == "2×100+2"
    assert "mapped weights" in found["peak_memory_bytes"]["context"]["covers"]
    empty = [row for row in rows if row["value"] is None]
    assert [row["metric"] for row in empty] == list(speed.POINT_METRICS)
    assert all(row["context"]["skipped"] == "too long" for row in empty)


def test_percentile() -> None:
    assert speed.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert speed.percentile([0.0, 1.0], 90) == pytest.approx(0.9)
    assert speed.percentile([7.0], 10) == 7.0


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


def test_measure_takes_turns_and_skips_what_is_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    heard: list[tuple[str, float]] = []

    def fake_worker(subject: str, request: dict[str, Any]) -> Sample:
        asked.append((subject, len(json.dumps(request["prompts"]))))
        assert request["points"] == [{"batch": 2, "context": 100, "output": 2}] or request["points"] == []
        sample = make_sample([1.0], [[1.0, 1.0]], peak=1, opening=1.0)
        return Sample(**{**sample.__dict__, "points": sample.points[: len(request["points"])]})

    monkeypatch.setattr(speed, "_run_worker", fake_worker)
    rows = speed.measure(folder, folder, grid=[Point(2, 100, 2)], threads=1,
                         on_progress=lambda text, share: heard.append((text, share)))  # fmt: skip
    assert [subject for subject, _ in asked] == ["base", "artifact"] * 2
    assert len({size for _, size in asked}) == 1
    assert [share for _, share in heard] == [0, 0.25, 0.5, 0.75, 1]
    empty = [row for row in rows if row["value"] is None]
    assert {(row["subject"], row["metric"]) for row in empty} == {
        (subject, metric) for subject in ("base", "artifact") for metric in speed.POINT_METRICS
    }
    assert "102 tokens, the model has 64 positions" in empty[0]["context"]["skipped"]


def test_the_worker_for_real(folder: Path) -> None:
    """One fresh process end to end: request in, one JSON document out, rows from it."""
    request = {
        "runtime": "hf", "path": str(folder), "threads": 1, "dtype": "float32", "repeats": 2,
        "points": [{"batch": 2, "context": 8, "output": 3}],
        "prompts": speed.draw_prompts([Point(2, 8, 3)], 64),
    }  # fmt: skip
    sample = speed._run_worker("base", request)
    assert sample.page_cache == "warm"
    assert sample.points[0].point == Point(2, 8, 3)
    assert [len(run) for run in sample.points[0].steps_s] == [3, 3]
    rows = speed.summarize("base", [sample], {}, {})
    assert [row["metric"] for row in rows] == ["load_s", *speed.POINT_METRICS, "peak_memory_bytes"]
    assert all(row["value"] > 0 for row in rows)


def test_what_the_worker_refuses_is_our_error(folder: Path) -> None:
    request = {"runtime": "hf", "path": str(folder / "gone"), "threads": 1, "dtype": "float32",
               "repeats": 1, "points": [], "prompts": []}  # fmt: skip
    with pytest.raises(CompressError, match=r"config\.json is missing"):
        speed._run_worker("artifact", request)


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
