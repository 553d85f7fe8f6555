"""The report's document: written and read whole, and refused with words when it is not what the schema says."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_example import make_lone, make_report

from compress.errors import CompressError
from compress.evaluation import report as reports
from compress.evaluation.metrics import METRICS, row
from compress.paths import data_dir


@pytest.mark.parametrize("make", [make_report, make_lone])
def test_write_and_read_round_trip(make: Callable[[], reports.Report], tmp_path: Path) -> None:
    report = make()
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
    assert reports.read(tmp_path)["artifact"]["name"] == "tiny--gptq-4bit"


def test_numbers_that_are_none_become_null(tmp_path: Path) -> None:
    reports.write(tmp_path, make_report([row("perplexity", "artifact", "heldout", float("inf"))]))
    (stored,) = reports.read(tmp_path)["measurements"]
    assert stored["value"] is None
    assert stored["context"]["not_finite"] == {"value": "inf"}


def test_the_schema_is_one_and_speaks_of_every_part() -> None:
    schema = json.loads((data_dir("eval") / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == set(schema["required"]) == set(make_report())
    example = row("bpw", "base", "x", 1.0)
    assert set(schema["$defs"]["row"]["properties"]) == set(schema["$defs"]["row"]["required"]) == set(example)
    for metric in METRICS:  # names are open, and ours are among them
        assert reports.problem(make_report([row(metric, "artifact", "x", 1.0)])) is None


def test_what_may_be_added() -> None:
    """Other metrics, more about artifact and base, a verdict with and without its numbers."""
    report = make_report([{**row("bpw", "base", "x", 1), "metric": "energy_j"}])
    report["artifact"]["loaders"] = ["vLLM"]
    report["base"]["license"] = {"name": "x"}
    report["verdict"] = {"overall": "worse", "delta": 0.05, "basis": "perplexity", "tasks": {"a": {"value": 1}}}
    assert reports.problem(report) is None
    assert reports.problem({**report, "verdict": None, "verified": None}) is None


ROW = row("bpw", "base", "x", 1.0)
VERDICT = {"overall": "worse", "delta": 0.01, "basis": "accuracy", "tasks": {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema must be 1, the version that is read here, not 2"),
        ({"extra": 1}, 'the report has the unknown key "extra"'),
        ({"mesurements": []}, "did you mean 'measurements'"),
        ({"schema": 2, "extra": 1}, "schema must be 1"),
        ({"artifact": {}}, "artifact lacks the key name"),
        ({"artifact": {"name": ""}}, r"artifact\.name must not be empty"),
        ({"artifact": {"name": "x", "notes": [1]}}, r"artifact\.notes\[0\] must be text, not 1"),
        ({"base": []}, r"base must be an object, not \[\]"),
        ({"base": {"name": 1}}, r"base\.name must be text or null, not 1"),
        ({"verified": 1}, "verified must be an object or null, not 1"),
        ({"verdict": {"overall": "worse"}}, "verdict lacks the key delta, basis or tasks"),
        ({"verdict": {**VERDICT, "overall": "fine"}},
         r'verdict\.overall must be non_inferior, worse or undecided, not "fine"'),
        ({"verdict": {**VERDICT, "delta": -1}}, r"verdict\.delta must be at least 0, not -1"),
        ({"verdict": {**VERDICT, "tasks": {"a b": 1}}}, r'verdict\.tasks\["a b"\] must be text or an object, not 1'),
        ({"verdict": {**VERDICT, "hihg": 1}}, "did you mean 'high'"),
        ({"measurements": {}}, r"measurements must be a list, not \{\}"),
        ({"measurements": [ROW, 1]}, r"measurements\[1\] must be an object, not 1"),
        ({"measurements": [{"metric": "bpw"}]}, r"measurements\[0\] lacks the key subject, task"),
        ({"measurements": [{**ROW, "sigma": 1}]}, r'measurements\[0\] has the unknown key "sigma"'),
        ({"measurements": [{**ROW, "metric": "Top 1"}]}, r"measurements\[0\]\.metric must be a name in lower case"),
        ({"measurements": [{**ROW, "value": "1"}]}, r'measurements\[0\]\.value must be a number or null, not "1"'),
        ({"measurements": [{**ROW, "value": True}]}, r"measurements\[0\]\.value must be a number or null, not true"),
        ({"measurements": [{**ROW, "n": 1.5}]}, r"measurements\[0\]\.n must be a whole number or null, not 1\.5"),
        ({"measurements": [{**ROW, "subject": "both"}]}, r"measurements\[0\]\.subject must be base, artifact or pair"),
        ({"measurements": [{**ROW, "task": None}]}, r"measurements\[0\]\.task must be text, not null"),
        ({"measurements": [{**ROW, "context": None}]}, r"measurements\[0\]\.context must be an object, not null"),
    ],
)  # fmt: skip
def test_invalid_reports_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    report = {**make_report([]), **change}
    with pytest.raises(AssertionError, match=words):
        reports.write(tmp_path, report)
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(CompressError, match=words) as raised:
        reports.read(tmp_path)
    assert raised.value.where == str(tmp_path / "report.json")


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    report = make_report([])
    del report["verdict"]
    assert reports.problem(report) == "the report lacks the key verdict"


def test_a_hostile_name_cannot_write_to_the_terminal() -> None:
    words = reports.problem({**make_report([]), "\x1b[2J": 1})
    assert words is not None
    assert "\x1b" not in words
    assert "\x1b" not in str(reports.problem({**make_report([]), "verdict": {**VERDICT, "tasks": {"\x1b": 1}}}))


def test_missing_and_broken_reports(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="No report"):
        reports.read(tmp_path)
    cases = (("{", "no JSON"), ("[]", "the report must be an object"), ('{"schema": NaN}', "NaN is no JSON number"))
    for text, words in cases:
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(CompressError, match=words):
            reports.read(tmp_path)
