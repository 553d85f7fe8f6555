"""The page: whole, in its order, with every stranger's word as text, and without a network."""

import base64
import hashlib
import json
import re
from functools import cache
from html.parser import HTMLParser

import pytest
from report_example import EVIL, accuracy_rows, block_rows, cost_rows, fidelity_rows, make_lone, make_report

from compress.evaluation.charts import charts
from compress.evaluation.draw import Drawn
from compress.evaluation.generation import Written
from compress.evaluation.marks import Chart
from compress.evaluation.metrics import row
from compress.evaluation.page import html
from compress.evaluation.report import Report

VOID = ("meta", "link", "img", "br")


class Page(HTMLParser):
    """Every tag with its attributes, the text outside scripts and styles, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self.open and self.open[-1] != "style":
            self.text += data


FULL, LONE = make_report(), make_lone()


def drawn(report: Report) -> Drawn:
    """The charts with a script in place of a megabyte of Vega."""
    return Drawn(made(json.dumps(report)), "window.vegaEmbed = () => Promise.resolve();", ())


@cache
def made(report: str) -> tuple[Chart, ...]:
    return tuple(charts(json.loads(report)))


def evil_report() -> Report:
    """A stranger's word in every text of a report."""
    where = {EVIL: EVIL}
    rows = [
        *fidelity_rows(EVIL, where), *accuracy_rows((EVIL, "other")), *cost_rows(),
        row("block_error", "pair", EVIL, 0.2), row("block_error", "pair", "b", 0.1),
        row("decode_tok_s", "base", "speed", None, conditions={**where, "batch": EVIL}, context={"skipped": EVIL}),
        row("decode_tok_s", "base", EVIL, 1.0, conditions=where, context={"weights": EVIL, "time": EVIL}),
        row("flips", "pair", EVIL, 0.1, context={"gained": EVIL, "lost": EVIL}),
        {**row("bpw", "base", EVIL, 1.0), "unit": EVIL},
    ]  # fmt: skip
    report = make_report(rows, name=EVIL, recipe=EVIL, method=[EVIL], scheme=EVIL, format=EVIL, notes=[EVIL], base=EVIL)
    report["base"] |= {"revision": EVIL, "architecture": EVIL}
    report["verified"] = {EVIL: EVIL, "blocks": EVIL}
    report["verdict"] |= {"rule": EVIL, "tasks": {EVIL: EVIL, "other": {"overall": EVIL}}}
    return report


def test_strangers_words_are_text_everywhere() -> None:
    report = evil_report()
    shown = drawn(report)
    texts = [Written(EVIL, EVIL, EVIL, "x" + EVIL), Written("\x00", "\ud800", None, "\x1b[2J\u202e\nline")]
    text = html(report, EVIL, EVIL, shown, texts)
    text.encode()
    assert not set(text) & {"\x00", "\x1b", "\u202e"}
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "embed", "a", "link", "base", "form"}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "alert(1)" in page.text
    assert len(page.scripts) == 3
    attributes, data = page.scripts[0]
    assert attributes == {"type": "application/json", "id": "charts"}
    assert json.loads(data) == {chart.name: chart.spec for chart in shown.charts}
    assert "<" not in data
    assert json.dumps(EVIL)[1:-1] in json.dumps(json.loads(data))
    assert all("alert" not in script for _, script in page.scripts[1:])


def test_names_are_data_in_charts_and_nothing_else() -> None:
    """Vega reads field names, titles and expressions; a stranger's word stands in none of them."""
    for chart in drawn(evil_report()).charts:
        assert "alert" not in json.dumps(without_data(chart.spec))


def without_data(spec: object) -> object:
    """The spec without its values."""
    if isinstance(spec, dict):
        return {key: without_data(value) for key, value in spec.items() if key not in ("data", "datasets")}
    return [without_data(part) for part in spec] if isinstance(spec, list) else spec


@pytest.mark.parametrize("report", [FULL, LONE, make_report([])], ids=["all", "lone", "nothing"])
def test_the_page_needs_no_network(report: Report) -> None:
    text = html(report, "version: 1", "plan", drawn(report))
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "a", "base")
        assert not {"src", "href", "srcset", "action", "background"} & set(attributes)
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in style + page.text
    assert "http" not in json.dumps([chart.spec for chart in drawn(report).charts])


def test_only_our_scripts_may_run_and_nothing_be_fetched() -> None:
    text = html(FULL, "", "", drawn(FULL))
    page = Page(text)
    (policy,) = (str(a["content"]) for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "eval" not in policy
    for _, script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    quiet = Page(html(FULL, "", ""))
    assert quiet.scripts == []
    assert "script-src 'none'" in str(quiet.tags)


def test_the_order_in_which_people_ask() -> None:
    text = Page(html(FULL, "the recipe", "the plan", drawn(FULL))).text
    order = [
        "tiny--gptq-4bit", "Compressed from org/tiny", "Undecided", "3.4× smaller", "−0.84 pp", "+5.78%", "1.60×",
        "What it is", "Is it good enough?", "non-inferior when", "Accuracy by task", "Accuracy difference", "arc_easy",
        "97.2%", "Log of the perplexity ratio", "Likelihood", "By position", "17–32", "ratio by position",
        "Divergence from", "How small and how fast?",
        "Prefill speed", "Decode speed", "Size and memory", "Where it comes from", "Error by block",
        "Distribution of the divergence", "group_size 128", "the recipe", "the plan", "Conditions", "num fewshot",
    ]  # fmt: skip
    places = []
    for word in order:
        places.append(text.index(word, places[-1] if places else 0))
    assert places == sorted(places)


def test_tables_hold_every_number_without_a_script() -> None:
    text = Page(html(FULL, None, None)).text
    numbers = (
        "16.3", "15.7 – 16.8", "+0.0562", "+0.0518 to +0.0607", "0.0700", "0.0680 – 0.0725", "85.8%", "70.0%", "30.9",
        "17.4", "10.9 – 24.6", "11.5", "11.4%", "+4.90 pp", "18.8%", "60 lost, 40 gained",
        "−1.39 to −0.29 pp", "156 MB", "16.0", "23.8 – 28.2", "0.403",
    )  # fmt: skip
    for number in numbers:
        assert number in text, number
    for name in ("model.layers.0", "model.layers.29"):
        assert name in text


def test_what_both_wrote_stands_side_by_side_in_a_folded_part() -> None:
    texts = [Written("list", f"Count {i}:", "one, two", "one, three") for i in range(6)]
    whole = html(FULL, None, None, texts=texts)
    folded = whole[whole.index("What they write") : whole.index("</details>", whole.index("What they write"))]
    assert whole[: whole.index("What they write")].endswith("<details><summary>")
    text = " ".join(Page(folded.removeprefix("What they write: the first prompts</summary>")).text.split())
    assert [f"Count {i}:" in text for i in range(6)] == [True] * 4 + [False] * 2
    assert (
        folded.count('<span class="soft">one, t</span>wo') == folded.count('<span class="soft">one, t</span>hree') == 4
    )
    alone = Page(html(LONE, None, None, texts=[Written("list", "Count:", None, "one")])).text
    assert "What it writes" in alone
    assert "What it writes" not in Page(html(LONE, None, None)).text


def test_charts_stand_where_there_are_rows() -> None:
    def figures(report: Report) -> list[str | None]:
        page = Page(html(report, "", "", drawn(report)))
        assert all("hidden" in attributes for tag, attributes in page.tags if tag == "figure")  # until they are drawn
        return [attributes["data-chart"] for tag, attributes in page.tags if tag == "figure"]

    assert figures(make_report([])) == []
    assert figures(make_report(block_rows(1))) == ["block_error"]
    assert figures(make_report(cost_rows())) == ["prefill", "decode", "ttft", "itl", "size", "memory"]
    assert figures(LONE) == ["accuracy", "perplexity", "prefill", "decode", "ttft", "itl", "size", "memory"]
    assert len(figures(FULL)) == 13


def test_a_page_of_nothing_says_so() -> None:
    empty = make_report([], notes=[])
    empty |= {"verdict": None, "verified": None}
    text = Page(html(empty, None, None)).text
    assert "No verdict" in text
    assert "Not verified" in text
    assert "How it was made" not in text
    assert not re.search(r"\d", text[text.index("Is it good enough?") :].replace("95%", "").replace("top-1", ""))


def test_one_checkpoint_is_spoken_of_alone() -> None:
    text = Page(html(LONE, None, None, drawn(LONE))).text
    assert "One checkpoint, measured alone" in text
    assert "There is nothing to compare with" in text
    assert not re.search(r"\bbase\b|artifact|KLD|paired|change", text)


def test_light_dark_and_paper() -> None:
    text = html(FULL, "", "")
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_what_disturbed_and_what_was_not_run_is_said() -> None:
    where = {"batch": 1, "context": 9000, "output": 16}
    rows = [row("decode_tok_s", "base", "speed", None, conditions=where, context={"skipped": "too long"}),
            row("peak_memory_bytes", "artifact", "speed", 1.5e9, context={"cpu_share": 0.4})]  # fmt: skip
    text = Page(html(make_report(rows), "", "")).text
    assert "40.0% of its threads" in text
    assert "1×9000+16: too long" in text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ({"overall": "non_inferior", "value": 0.01, "low": 0.002, "high": 0.02},
         "Non-inferior The log of the perplexity ratio is +0.01 (95% interval +0.002 to +0.02); the margin is 0.05."),
        ({"overall": "worse"}, "Worse By perplexity; the margin is 0.05."),
        ({"overall": "undecided", "value": 0.1, "delta": None}, "Undecided The log of the perplexity ratio is +0.1."),
    ],
)  # fmt: skip
def test_the_verdict_in_words(verdict: dict[str, object], words: str) -> None:
    report = make_report([])
    report["verdict"] = {"delta": 0.05, "basis": "perplexity", "tasks": {"a": "non_inferior"}, **verdict}
    text = " ".join(Page(html(report, "", "")).text.split())
    assert words in text
    assert "a non-inferior" in text
