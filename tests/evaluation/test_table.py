"""Numbers as text, rows that belong together, and the table of at most 80 columns."""

import re

import pytest
from report_example import EVIL, HARNESS, SPEED, accuracy_rows, make_lone, make_report

from compress.evaluation import text
from compress.evaluation.metrics import row
from compress.evaluation.rows import SPECS, block_errors, groups, headline
from compress.evaluation.table import lines, position_lines, summary_lines, summary_table, task_lines

POINT = {**SPEED, "batch": 1, "context": 128, "output": 16}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234.5, "1,230"), (0.01234, "0.0123"), (9.999, "10.0"), (16, "16.0"), (1.23e-6, "1.23e-06"),
     (-0.5, "-0.500"), (99999, "100,000")],
)  # fmt: skip
def test_three_digits(value: float, shown: str) -> None:
    assert text.sig3(value) == shown


def test_units() -> None:
    assert [text.show_bytes(size) for size in (0, 512, 1500, 538e6, 1.234e9, 999.9e6)] == [
        "0 B", "512 B", "1.50 kB", "538 MB", "1.23 GB", "1.00 GB",
    ]  # fmt: skip
    assert [text.show_seconds(time) for time in (0.0123, 1.5, 0.9999)] == ["12.3 ms", "1.50 s", "1.00 s"]
    assert text.show_ratio(538, 156) == "0.29×"
    assert text.show_ratio(1, 0.0123) == "0.0123×"
    assert text.show_ratio(0, 1) == "–"
    assert text.show_change(10, 10.043) == "+0.430%"
    assert text.show_change(10, 9) == "−10.0%"
    assert text.show_change(10, 10) == "0%"
    assert [text.show_points(v) for v in (-0.0042, 0.1, 0, -1e-9)] == ["−0.42 pp", "+10.00 pp", "0.00 pp", "0.00 pp"]


def cells(table: str, label: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(label))
    return re.split(r"\s{2,}", line[len(label) :].strip())


def test_summary_table() -> None:
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
        row("peak_memory_bytes", "artifact", "speed", 1.5e9, n=2, conditions=SPEED),
    ]
    table = summary_table(make_report(rows))
    assert all(len(line) <= 80 for line in table.splitlines())
    assert cells(table, "checkpoint") == ["538 MB", "156 MB", "0.29×"]
    assert cells(table, "bits per quantized weight") == ["16.0", "4.25", "0.27×"]
    assert cells(table, "perplexity") == ["10.0", "10.0", "+0.430%"]
    assert cells(table, "KLD mean, nats") == ["0.0123"]
    assert cells(table, "KLD p99, nats") == ["–"]
    assert cells(table, "top-1 agreement") == ["98.8%"]
    assert cells(table, "prefill tok/s, 1×128+16") == ["400", "1,230", "3.09×"]
    assert cells(table, "decode tok/s, 1×128+16") == ["–", "–", "–"]
    assert cells(table, "peak memory") == ["–", "1.50 GB", "–"]
    assert "load time" not in table  # nobody asked for it
    assert summary_lines(make_report(rows))[2].spread == "9.90 – 10.2"


def test_table_of_everything() -> None:
    table = summary_table(make_report())
    assert all(len(line) <= 80 for line in table.splitlines())
    assert cells(table, "greedy agreement, tokens, openings") == ["17.4"]
    assert cells(table, "repeated 4-grams, openings") == ["11.4%", "16.3%", "+4.90 pp"]
    assert "outputs that end" not in table
    assert cells(table, "accuracy difference, pooled") == ["−0.84 pp"]
    assert cells(table, "answers that changed, pooled") == ["11.0%"]
    assert cells(table, "recovery, pooled") == ["97.2%"]
    assert cells(table, "perplexity of a word, wikitext") == ["28.1", "30.9", "+9.96%"]
    assert len([line for line in table.splitlines() if line.startswith("accuracy, ")]) == 5
    assert len(cells(table, "accuracy, arc_easy")) == 3


def test_table_of_nothing_invents_nothing() -> None:
    table = summary_table(make_report([]))
    assert not re.search(r"\d", table.replace("top-1", "").replace("p99", ""))


def test_table_of_one_checkpoint_has_one_column() -> None:
    table = summary_table(make_lone())
    assert table.splitlines()[0].split() == ["artifact"]
    assert cells(table, "checkpoint") == ["156 MB"]
    assert "KLD" not in table


def test_conditions_that_differ_stand_in_the_label_and_keep_rows_apart() -> None:
    where = {**POINT, "hardware": "x" * 90}
    rows = [row("decode_tok_s", "base", "speed", 1.0, conditions={**where, "runtime": name})
            for name in ("hf", "packed")]  # fmt: skip
    labels = [line.label for line in summary_lines(make_report(rows)) if line.label.startswith("decode")]
    assert labels == ["decode tok/s, 1×128+16, runtime hf", "decode tok/s, 1×128+16, runtime packed"]


@pytest.mark.parametrize("name", ["\x1b[2J" + "t" * 200, EVIL])
def test_long_and_hostile_names_stay_in_their_cell(name: str) -> None:
    rows = [row("perplexity", "base", name, 1.0), row("acc", "artifact", name, 0.5, conditions={name: name})]
    table = summary_table(make_report(rows))
    assert max(map(len, table.splitlines())) <= 80
    assert "\x1b" not in table


def test_the_main_accuracy_is_the_one_that_the_suite_counts() -> None:
    def rows(counts: str | None) -> list:
        return [
            *(row(metric, subject, "t", value, context={"counts": metric == counts})
              for metric, both in (("acc", (0.5, 0.48)), ("acc_norm", (0.6, 0.59)))
              for subject, value in zip(("base", "artifact"), both, strict=True)),
            row("acc_delta", "pair", "t", -0.02, low=-0.03, high=0.01),
        ]  # fmt: skip

    assert headline(make_report(rows("acc"))) == {"t": "acc"}
    assert headline(make_report(rows("acc_norm"))) == {"t": "acc_norm"}
    assert headline(make_report(rows(None))) == {"t": "acc"}
    assert [(line.metric, line.change, line.change_range) for line in task_lines(make_report(rows("acc")))] == [
        ("acc", "−2.00 pp", "−3.00 to +1.00 pp"), ("acc norm", "−1.00 pp", ""),
    ]  # fmt: skip


def test_one_line_a_task_with_both_intervals_and_the_answers_that_changed() -> None:
    found = task_lines(make_report(accuracy_rows(("a", "b"), n=200)))
    assert [(line.task, line.metric) for line in found] == [
        ("a", "acc"), ("a", "acc norm"), ("b", "acc"), ("b", "acc norm"), ("pooled", ""),
    ]  # fmt: skip
    assert [line.all for line in found] == [False] * 4 + [True]
    assert [line.main for line in found] == [False, True, False, True, True]
    assert (found[-1].base, found[-1].change, found[-1].flips) == ("–", "−0.84 pp", "296 lost, 254 gained")
    for line in found[1:4:2]:
        assert re.fullmatch(r"[\d.]+ – [\d.]+%", line.base_range)
        assert re.fullmatch(r"[\d.]+ – [\d.]+%", line.artifact_range)
        assert re.fullmatch(r"[−+]?[\d.]+ to [−+]?[\d.]+ pp", line.change_range)
        assert re.fullmatch(r"\d+ lost, \d+ gained", line.flips)
        assert line.n == "200"


def test_ranges_say_their_unit_once() -> None:
    report = make_report([row("peak_memory_bytes", "artifact", "x", 8e8, low=7e8, high=8e8),
                          row("load_s", "artifact", "x", 1.0, low=0.5, high=1.5)])  # fmt: skip
    assert [line.artifact_range for line in lines(report, [SPECS["peak_memory_bytes"], SPECS["load_s"]])] == [
        "700 – 800 MB", "500 ms – 1.50 s",
    ]  # fmt: skip


def test_perplexity_by_position_has_a_line_for_each_class() -> None:
    def parts(*nats: float) -> dict:
        spans = ((1, 16), (17, 32))
        return {"by_position": [{"from": a, "to": b, "n": 32, "nats": v, "low": v - 0.1, "high": v + 0.1}
                                for (a, b), v in zip(spans, nats, strict=True)]}  # fmt: skip

    rows = [row("perplexity", "base", "text", 8.0, context=parts(2.0, 1.0)),
            row("perplexity", "artifact", "text", 9.0, context=parts(2.0, 1.5)),
            row("nll_delta", "pair", "text", 0.25, context=parts(0.0, 0.5))]  # fmt: skip
    found = position_lines(make_report(rows))
    assert [(line.where, line.positions, line.base, line.artifact, line.change, line.n) for line in found] == [
        ("text", "1–16", "7.39", "7.39", "0", "32"), ("text", "17–32", "2.72", "4.48", "+0.500", "32"),
    ]  # fmt: skip
    assert found[1].change_range == "+0.400 to +0.600"
    assert [line.base for line in position_lines(make_report(rows[1:2]))] == ["–", "–"]
    assert position_lines(make_report([row("perplexity", "artifact", "t", 2.0, context={"by_position": "x"})])) == []


def test_blocks_stand_in_the_models_order() -> None:
    assert [r["task"] for r in block_errors(make_report())] == [f"model.layers.{i}" for i in range(30)]


def test_groups_match_base_and_artifact() -> None:
    found = groups(make_report(), SPECS["acc"])
    assert [group.task for group in found] == ["arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande"]
    assert all(set(group.rows) == {"base", "artifact"} for group in found)
    assert found[0].rows["base"]["conditions"] == HARNESS
