"""The report's document and pages: structure, numbers as text, and that nothing untrusted gets through."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.errors import CompressError
from compress.evaluation import report as reports
from compress.evaluation.metrics import Row, row

EVIL = "<script>alert(1)</script> | `x` [a](http://evil)"
SPEED = {"runtime": "hf", "device": "cpu", "threads": 2, "dtype": "bfloat16", "hardware": "CPU × 2"}
POINT = {**SPEED, "batch": 1, "context": 128, "output": 16}


def make_rows() -> list[Row]:
    rows = [
        row("size_bytes", "base", "checkpoint", 538e6),
        row("size_bytes", "artifact", "checkpoint", 156e6),
        row("bpw", "base", "checkpoint", 16.0),
        row("bpw", "artifact", "checkpoint", 4.25),
        row("perplexity", "base", "heldout", 10.0, n=4096),
        row("perplexity", "artifact", "heldout", 10.043, low=9.9, high=10.2, n=4096),
        row("kld_mean", "pair", "heldout", 0.01234, n=4096),
        row("top1_agreement", "pair", "heldout", 0.9876, n=4096),
        row("prefill_tok_s", "base", "speed", 400.0, low=390, high=410, n=4, conditions=POINT),
        row("prefill_tok_s", "artifact", "speed", 1234.5, low=1200, high=1300, n=4, conditions=POINT),
        row("decode_tok_s", "base", "speed", None, conditions=POINT, context={"skipped": "too long"}),
        row("peak_memory_bytes", "artifact", "speed", 1.5e9, n=2, conditions=SPEED, context={"cpu_share": 0.4}),
    ]
    order = ["model.layers.10", "model.layers.2", "model.layers.0"]
    return rows + [row("block_error", "pair", name, 0.01 * i + 0.01) for i, name in enumerate(order)]


def make_report(name: str = "tiny--rtn", base: str = "org/tiny", **artifact: Any) -> reports.Report:
    return reports.build(
        artifact={"name": name, "recipe": "rtn-4bit", "method": "rtn", "scheme": "W4A16", **artifact},
        base={"name": base, "revision": "abc"},
        measurements=make_rows(),
        verified={"max_error": 0.0},
        verdict={"overall": "non_inferior", "delta": 0.05, "basis": "perplexity", "tasks": {}},
    )


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    report = make_report()
    assert reports.write(tmp_path, report) == tmp_path / "report.json"
    assert reports.read(tmp_path) == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert list(report) == ["schema", "artifact", "base", "verified", "verdict", "measurements"]


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports.write(tmp_path, make_report())

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        reports.write(tmp_path, make_report(name="other"))
    assert reports.read(tmp_path)["artifact"]["name"] == "tiny--rtn"


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    report = reports.build(artifact={"name": "a"}, base={"name": "b"},
                           measurements=[row("perplexity", "artifact", "heldout", float("inf"))])  # fmt: skip
    reports.write(tmp_path, report)
    (stored,) = reports.read(tmp_path)["measurements"]
    assert stored["value"] is None
    assert stored["context"]["not_finite"] == {"value": "inf"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"extra": 1}, "extra"),
        ({"artifact": {}}, "artifact must be"),
        ({"verified": 1}, "verified must be"),
        ({"verdict": {"overall": "fine"}}, r"verdict\.overall"),
        ({"measurements": {}}, "must be a list"),
        ({"measurements": [{"metric": "bpw"}]}, r"measurements\[0\] must have"),
        ({"measurements": [{**row("bpw", "base", "x", 1.0), "value": "1"}]}, "numbers or null"),
        ({"measurements": [{**row("bpw", "base", "x", 1.0), "subject": "both"}]}, "subject must be"),
        ({"measurements": [{**row("bpw", "base", "x", 1.0), "task": None}]}, "must be text"),
        ({"measurements": [{**row("bpw", "base", "x", 1.0), "context": None}]}, "must be objects"),
    ],
)
def test_invalid_reports_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**make_report(), **change}))
    with pytest.raises(CompressError, match=words):
        reports.read(tmp_path)


def test_missing_and_broken_reports(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="No report"):
        reports.read(tmp_path)
    for text, words in (("{", "no JSON"), ("[]", "not an object")):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(CompressError, match=words):
            reports.read(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,230"), (0.01234, "0.0123"), (9.999, "10.0"), (16, "16.0"), (1.23e-6, "1.23e-06"),
     (-0.5, "-0.500"), (99999, "100,000")],
)  # fmt: skip
def test_three_digits(value: float, text: str) -> None:
    assert reports.sig3(value) == text


def test_units() -> None:
    assert [reports.show_bytes(size) for size in (0, 512, 1500, 538e6, 1.234e9, 999.9e6)] == [
        "0 B", "512 B", "1.50 kB", "538 MB", "1.23 GB", "1.00 GB",
    ]  # fmt: skip
    assert [reports.show_seconds(time) for time in (0.0123, 1.5, 0.9999)] == ["12.3 ms", "1.50 s", "1.00 s"]
    assert reports.show_ratio(538, 156) == "0.29×"
    assert reports.show_ratio(1, 0.0123) == "0.0123×"
    assert reports.show_ratio(0, 1) == "–"
    assert reports.show_change(10, 10.043) == "+0.430%"
    assert reports.show_change(10, 9) == "−10.0%"
    assert reports.show_change(10, 10) == "0%"


def cells(table: str, label: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(label))
    return re.split(r"\s{2,}", line[len(label) :].strip())


def test_summary_table() -> None:
    table = reports.summary_table(make_report())
    assert all(len(line) <= 80 for line in table.splitlines())
    assert cells(table, "checkpoint") == ["538 MB", "156 MB", "0.29×"]
    assert cells(table, "bits per weight") == ["16.0", "4.25", "0.27×"]
    assert cells(table, "perplexity") == ["10.0", "10.0", "+0.430%"]
    assert cells(table, "KLD mean, nats") == ["0.0123"]
    assert cells(table, "KLD p99, nats") == ["–"]
    assert cells(table, "top-1 agreement") == ["98.8%"]
    assert cells(table, "prefill tok/s, 1×128+16") == ["400", "1,230", "3.09×"]
    assert cells(table, "decode tok/s, 1×128+16") == ["–", "–", "–"]
    assert cells(table, "peak memory") == ["–", "1.50 GB", "–"]
    assert cells(table, "load time") == ["–", "–", "–"]


def test_table_of_nothing_invents_nothing() -> None:
    empty = reports.build(artifact={"name": "a"}, base={"name": "b"}, measurements=[])
    table = reports.summary_table(empty)
    assert not re.search(r"\d", table.replace("top-1", "").replace("p99", ""))
    page = reports.html(empty, "", "")
    assert "No verdict" in page
    assert "Not verified" in page


def test_conditions_that_differ_stand_in_the_label_and_keep_rows_apart() -> None:
    where = {**POINT, "hardware": "x" * 90}
    rows = [row("decode_tok_s", "base", "speed", 1.0, conditions={**where, "runtime": name})
            for name in ("hf", "packed")]  # fmt: skip
    report = reports.build(artifact={"name": "a"}, base={"name": "b"}, measurements=rows)
    labels = [line.label for line in reports.summary_lines(report) if line.label.startswith("decode")]
    assert labels == ["decode tok/s, 1×128+16, runtime hf", "decode tok/s, 1×128+16, runtime packed"]
    long = reports.build(artifact={"name": "a"}, base={"name": "b"},
                         measurements=[row("perplexity", "base", "\x1b[2J" + "t" * 200, 1.0)])  # fmt: skip
    table = reports.summary_table(long)
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in table


class Tags(HTMLParser):
    """Every tag with its attributes, and the tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_escaped_and_needs_no_network() -> None:
    report = make_report(EVIL, notes=[EVIL])
    report["measurements"].append(row("perplexity", "artifact", EVIL, 1.0, conditions={EVIL: EVIL}))
    report["measurements"].append(row("block_error", "pair", EVIL, 0.5))
    page = reports.html(report, f"steps: {EVIL}", f"plan {EVIL}")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for tag, attributes in tags.seen:
        assert tag not in ("script", "link", "img", "iframe", "object", "a")
        assert not {"src", "href", "onclick", "onload"} & set(attributes)
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert "non inferior, by perplexity, margin 0.05" in page
    assert "40.0% of its threads" in page
    assert "1×128+16: too long" in page


def test_block_bars_stand_in_the_models_order() -> None:
    bars, top = reports.block_bars(make_report())
    assert [bar.title.split(":")[0] for bar in bars] == [f"model.layers.{i}" for i in (0, 2, 10)]
    assert top == pytest.approx(0.03)
    assert bars[0].height == reports.CHART[1]
    assert bars[-1].x + bars[-1].width <= reports.CHART[0]
    flat = [row("block_error", "pair", "model.layers.0", 0.0)]
    report = reports.build(artifact={"name": "a"}, base={"name": "b"}, measurements=flat)
    assert reports.block_bars(report)[0][0].height == 0


def test_card_front_matter_and_body() -> None:
    text = reports.card(make_report(), "rtn-4bit", "version: 1\n", "apache-2.0")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/tiny", "base_model_relation": "quantized", "library_name": "transformers",
        "license": "apache-2.0", "tags": ["compress", "rtn", "W4A16", "compressed-tensors"],
        "pipeline_tag": "text-generation",
    }  # fmt: skip
    assert 'name = "tiny--rtn"' in body
    assert "vllm serve tiny--rtn" in body
    assert "| checkpoint | 538 MB | 156 MB | 0.29× | – | – |" in body
    assert "```yaml\nversion: 1\n```" in body
    assert "- hardware: CPU × 2" in body


def test_card_without_license_or_hub_name() -> None:
    text = reports.card(make_report(base="/somewhere/private/tiny"), "r", "", None)
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert not {"license", "base_model", "base_model_relation"} & set(front)
    assert "private" not in text


def test_card_escapes_what_strangers_wrote() -> None:
    report = make_report(EVIL, base=EVIL, notes=[EVIL + "\n# head"])
    text = reports.card(report, EVIL, "```\n<script>", "x: [")
    front, body = text.split("---\n", 2)[1:]
    assert yaml.safe_load(front)["license"] == "x: ["
    outside = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", body)
    assert "<script" not in outside
    assert "[a](" not in outside
    assert "\n# head" not in outside
    assert "````yaml\n```\n<script>\n````" in body
