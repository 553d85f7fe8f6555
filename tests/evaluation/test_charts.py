"""The charts: made of the rows that exist, true to them, and drawn as pictures in a process of their own."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from report_example import EVIL, TASKS, accuracy_rows, block_rows, cost_rows, fidelity_rows, make_lone, make_report

from compress.evaluation.charts import NAMES, charts
from compress.evaluation.draw import draw
from compress.evaluation.marks import Chart, picture
from compress.evaluation.metrics import row
from compress.evaluation.report import Report


def by_name(report: Report) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(report)}


@pytest.fixture(scope="module")
def full() -> dict[str, Chart]:
    return by_name(make_report())


def values(chart: Chart) -> list[dict[str, Any]]:
    """All data of a chart, layer by layer."""
    parts = [chart.spec, *chart.spec.get("layer", [])]
    return [item for part in parts for item in part.get("data", {}).get("values", [])]


def test_every_kind_of_row_has_its_chart(full: dict[str, Chart]) -> None:
    assert set(full) == set(NAMES)
    assert by_name(make_report([])) == {}
    empty = [row(m, s, "t", None) for m, s in (("acc", "base"), ("acc_delta", "pair"), ("block_error", "pair"),
             ("kld_mean", "pair"), ("size_bytes", "artifact"), ("decode_tok_s", "base"))]  # fmt: skip
    assert by_name(make_report(empty)) == {}
    assert set(by_name(make_lone())) == {
        "accuracy", "perplexity", "size", "memory", "prefill", "decode", "ttft", "itl",
    }  # fmt: skip


def test_accuracy_has_both_models_on_each_task_with_their_intervals(full: dict[str, Chart]) -> None:
    main = values(full["accuracy"])
    assert list(dict.fromkeys(v["label"] for v in main)) == list(TASKS)
    assert {v["subject"] for v in main} == {"base", "artifact"}
    assert all(v["low"] < v["value"] < v["high"] for v in main)
    pooled = [v for v in values(full["accuracy_difference"]) if v.get("all")]
    assert [(v["label"], round(v["value"], 2), v["shown"]) for v in pooled[:1]] == [("pooled", -0.84, "−0.84 pp")]
    lines = [v for v in values(full["accuracy_difference"]) if set(v) == {"value"}]
    assert [v["value"] for v in lines] == [0, -1.0]  # zero, and the margin of the verdict


def test_the_margin_stands_in_the_chart_of_the_verdicts_basis_only() -> None:
    wanted = ("nll_delta", "acc_delta")
    report = make_report([r for r in make_report()["measurements"] if r["metric"] in wanted])
    report["verdict"] |= {"basis": "perplexity", "delta": 0.05}
    found = by_name(report)
    assert [v["value"] for v in values(found["nll_difference"]) if set(v) == {"value"}] == [0, 0.05]
    assert [v["value"] for v in values(found["accuracy_difference"]) if set(v) == {"value"}] == [0]


def test_blocks_stand_in_the_models_order_under_what_tells_them_apart() -> None:
    for count in (1, 126):
        found = values(by_name(make_report(block_rows(count)))["block_error"])
        assert [v["label"] for v in found] == [str(i) for i in range(count)]
        assert found[0]["name"] == "model.layers.0"


def test_divergence_is_drawn_on_a_logarithmic_axis_without_zeros() -> None:
    chart = by_name(make_report(fidelity_rows("heldout", {})))["kld"]
    found = [v for v in values(chart) if "text" not in v]
    assert {v["percentile"] for v in found} == set(range(101))
    assert min(v["value"] for v in found) > 0
    assert found[0]["shown"] == "0"
    assert '"type": "log"' in json.dumps(chart.spec)


@pytest.mark.parametrize("percentiles", [None, [0.0] * 101, [0.1] * 7, ["x"] * 101, {"a": 1}])
def test_no_distribution_without_something_to_see(percentiles: object) -> None:
    rows = [row("kld_mean", "pair", "heldout", 0.0, context={"percentiles": percentiles})]
    assert by_name(make_report(rows)) == {}


def test_the_loss_by_position_is_drawn_class_by_class() -> None:
    parts = [
        {"from": a, "to": b, "n": 32, "nats": v, "low": None, "high": None} for a, b, v in ((1, 16, 0.1), (17, 31, 0.2))
    ]
    longer = [*parts[:1], {**parts[1], "to": 32}]
    rows = [row("nll_delta", "pair", name, 0.15, context={"by_position": found})
            for name, found in (("heldout", parts), ("text", longer))]  # fmt: skip
    chart = by_name(make_report(rows))["position"]
    found = [v for v in values(chart) if "positions" in v][:4]  # of the first of two layers
    assert [(v["label"], v["positions"], v["value"], v["range"]) for v in found[::2]] == [
        ("heldout", "1–16", 0.1, "–"), ("heldout", "17–31", 0.2, "–"),
    ]  # fmt: skip
    assert [v["positions"] for v in found] == ["1–16", "1–16", "17–31", "17–32"]


def test_intervals_of_few_windows_do_not_hide_the_points() -> None:
    parts = [{"from": 1, "to": 16, "nats": 0.1, "low": -9.0, "high": 9.0, "n": 32},
             {"from": 17, "to": 32, "nats": 0.3, "low": 0.2, "high": 0.4, "n": 32}]  # fmt: skip
    chart = by_name(make_report([row("nll_delta", "pair", "t", 0.2, context={"by_position": parts})]))["position"]
    assert "cut off" in chart.caption
    spec = json.dumps(chart.spec)
    assert '"clip": true' in spec
    domain = json.loads(spec[spec.index('"domain": [') + 10 : spec.index("]", spec.index('"domain": [')) + 1])
    assert domain == pytest.approx([-0.612, 0.912])  # 0 to 0.3, twice 0.3 more on both sides, and a little


@pytest.mark.parametrize(
    "seen", [None, [], [{"from": 1}], ["x"], {"a": 1}, [{"from": 1, "to": 7, "n": 7, "nats": 0.1}]]
)
def test_no_positions_without_two_to_compare(seen: object) -> None:
    assert "position" not in by_name(make_report([row("nll_delta", "pair", "t", 0.1, context={"by_position": seen})]))


def test_size_and_memory_share_a_unit() -> None:
    found = values(by_name(make_report(cost_rows()))["size"])
    assert [(v["label"], v["subject"], v["value"], v["shown"]) for v in found][:2] == [
        ("checkpoint", "base", 538, "538 MB"), ("checkpoint", "artifact", 156, "156 MB"),
    ]  # fmt: skip


def test_speed_is_drawn_by_batch_and_by_context(full: dict[str, Chart]) -> None:
    def points(name: str) -> set[tuple[str, int, str]]:
        return {(v["subject"], v["x"], v["series"]) for v in values(full[name])}

    both = ("base", "artifact")
    by_batch = {(s, x, c) for s in both for x, c in ((1, "128 tokens"), (4, "128 tokens"), (1, "512 tokens"))}
    assert points("prefill") == points("decode") == by_batch
    by_context = {(s, x, b) for s in both for x, b in ((128, "batch 1"), (512, "batch 1"), (128, "batch 4"))}
    assert points("ttft") == points("itl") == by_context
    assert {v["value"] for v in values(full["itl"]) if v["subject"] == "base" and v["x"] == 512} == {60}  # ms


def test_memory_is_drawn_in_parts_that_make_the_peak(full: dict[str, Chart]) -> None:
    parts = [(v["subject"], v["part"], v["value"]) for v in values(full["memory"])]
    assert parts[:3] == [
        ("base", "weights", 270.0),
        ("base", "keys and values", 3.3),
        ("base", "everything else", 526.7),
    ]
    assert sum(value for subject, _, value in parts if subject == "artifact") == pytest.approx(800 / 1.6)


def test_a_picture_has_its_own_colours_and_says_what_it_shows(full: dict[str, Chart]) -> None:
    for chart in full.values():
        assert "var(--" in json.dumps(chart.spec)
        alone = picture(chart)
        assert "var(--" not in json.dumps(alone)
        assert alone["title"] == chart.title
        assert alone["width"] != "container"


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height as the file's header says."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and script come from a worker; pictures that have no rows any more go, others' files stay."""
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    rows = [*accuracy_rows((EVIL, "\x00\x1b\ud800")), *block_rows(1)]
    drawn = draw(make_report(rows, name=EVIL), tmp_path)
    assert drawn is not None
    names = ["accuracy", "accuracy_difference", "block_error"]
    assert [chart.name for chart in drawn.charts] == names
    assert drawn.pictures[0] == ("Accuracy by task", "charts/accuracy.png")
    assert sorted(p.name for p in (tmp_path / "charts").iterdir()) == [f"{name}.png" for name in names]
    for name in names:
        width, height = size_of((tmp_path / "charts" / f"{name}.png").read_bytes())
        assert 200 < width < 2400
        assert 150 < height < 1200
    assert "vegaEmbed" in drawn.script
    assert "</script" not in drawn.script.lower()
    (cached,) = (tmp_path / "cache").iterdir()
    assert cached.read_text().partition("\n")[2] == drawn.script

    (tmp_path / "charts" / "mine.png").write_bytes(b"")
    assert draw(make_report(block_rows(2)), tmp_path) is None  # the walk's rows alone: no worker, no pictures
    assert [p.name for p in (tmp_path / "charts").iterdir()] == ["mine.png"]
    (tmp_path / "charts" / "mine.png").unlink()
    assert draw(make_report([]), tmp_path) is None
    assert not (tmp_path / "charts").exists()
