"""The table of several checkpoints: what stands in it, how wide it is, and what must not stand in one table."""

import copy
from typing import Any

import pytest

from compress.evaluation.beside import beside, differences, html, text
from compress.evaluation.report import Report
from tests.evaluation.report_example import EVIL, SPEED, TEXT, accuracy_rows, cost_rows, fidelity_rows, make_report


def example(name: str, nats: float = 0.05, **conditions: Any) -> Report:
    rows = [*cost_rows(), *fidelity_rows("embedded", {**TEXT, **conditions}, nats), *accuracy_rows(("a", "b"))]
    report = make_report(rows)
    report["artifact"]["name"] = name
    return report


def test_a_line_for_each_and_one_for_the_base() -> None:
    table = beside({"one": example("one"), "two": example("two", 0.2)})
    assert [name for name, _, _ in table.lines] == ["org/tiny", "one", "two"]
    assert table.heads == ["size", "Δ accuracy", "recovery", "ppl", "KLD", "tok/s"]
    values = {name: [cell.value for cell in cells] for name, cells, _ in table.lines}
    assert values["org/tiny"] == ["538 MB", "", "", "15.4", "", "16.0"]
    assert values["two"][0] == "156 MB"
    assert values["two"][4] == "0.280"
    shown = text(table)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.splitlines()[-1].endswith("undecided")


def test_columns_that_nobody_has_are_left_out() -> None:
    table = beside({"one": make_report(fidelity_rows("embedded", TEXT))})
    assert table.heads == ["ppl", "KLD"]


def test_long_names_are_cut() -> None:
    lines = text(beside({"x" * 99: example("x"), "b": example("b")})).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" in lines[3]


def test_what_tells_of_the_checkpoint_may_differ() -> None:
    assert differences({"a": example("a"), "b": example("b", activations="int8 token")}) == []


def test_other_terms_are_named() -> None:
    found = differences({"a": example("a"), "b": example("b", data="another")})
    assert found == [
        'perplexity, embedded: a {"data": "7d8aa94d0980414e"}, b {"data": "another"}',
        'kld_mean, embedded: a {"data": "7d8aa94d0980414e"}, b {"data": "another"}',
    ]
    slower = copy.deepcopy(example("b"))
    for row in slower["measurements"]:
        if row["conditions"].get("threads"):
            row["conditions"]["threads"] = SPEED["threads"] + 1
    assert any(line.startswith("decode_tok_s, speed 1×128×16: a {\"threads\": 2}") for line in differences(
        {"a": example("a"), "b": slower}
    ))  # fmt: skip
    less = example("c")
    less["measurements"] = [r for r in less["measurements"] if r["metric"] != "recovery"]
    assert differences({"a": example("a"), "c": less}) == ["recovery, pooled: not measured of c"]


@pytest.mark.parametrize("links", [{}, {EVIL: "../x/report.html"}])
def test_strangers_words_stay_words(links: dict[str, str]) -> None:
    page = html(beside({EVIL: example(EVIL)}, [EVIL]), links)
    assert "<img" not in page
    assert "<script" not in page
    assert "default-src 'none'" in page
