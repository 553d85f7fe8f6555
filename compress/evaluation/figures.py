"""What a report comes to, in a few words: the key figures and the verdict, for the top of the page and the card.

Left out: any judgement of its own. The verdict is the document's; here it is only worded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compress.evaluation.metrics import Row
from compress.evaluation.report import Report
from compress.evaluation.rows import POOLED, SPECS, groups, lone
from compress.evaluation.table import show_range, shown
from compress.evaluation.text import show_change, show_points, show_ratio, sig3, signed

_OUTCOMES = {
    "non_inferior": ("Non-inferior", "good", "✓"),
    "worse": ("Worse", "bad", "✕"),
    "undecided": ("Undecided", "open", "?"),
}


@dataclass(frozen=True)
class Figure:
    """A key figure: what it is, its value, and what it is made of."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Badge:
    """The verdict: a word, its tone (good, bad, open, none), a sign that tells it without colours, and why;
    the rule as the document words it."""

    word: str
    tone: str
    sign: str
    reason: str
    rule: str
    tasks: tuple[tuple[str, str], ...]


def figures(report: Report) -> list[Figure]:
    """The key figures that the report has rows for: size, quality, speed."""
    makers = (_size, _bits, _accuracy, _perplexity, _divergence, _decode)
    return [figure for figure in (make(report) for make in makers) if figure is not None]


def _first(report: Report, metric: str, task: str | None = None) -> tuple[str, dict[str, Row]] | None:
    """The metric's first group with every value in place: held-out text first, then the document's order."""
    wanted = {"pair"} if SPECS[metric].pair else {"artifact"} if lone(report) else {"base", "artifact"}
    for group in groups(report, SPECS[metric]):
        whole = all(group.rows.get(subject, {}).get("value") is not None for subject in wanted)
        if whole and (task is None or group.task == task):
            return group.where or group.task, group.rows
    return None


def _both(report: Report, metric: str) -> tuple[str, str, float | None, float] | None:
    """Where, "base → artifact", and both values; of a lone checkpoint its own value only."""
    found = _first(report, metric)
    if found is None:
        return None
    where, rows = found
    artifact = rows["artifact"]["value"]
    if lone(report):
        return where, shown(SPECS[metric], artifact), None, artifact
    base = rows["base"]["value"]
    ends = [shown(SPECS[metric], value) for value in (base, artifact)]
    unit = ends[1].rpartition(" ")[2]
    if " " in ends[1] and ends[0].endswith(" " + unit):
        ends[0] = ends[0].removesuffix(" " + unit)
    return where, " → ".join(ends), base, artifact


def _size(report: Report) -> Figure | None:
    found = _both(report, "size_bytes")
    if found is None:
        return None
    _, text, base, artifact = found
    if base is None or not artifact:
        return Figure("Size", text, "checkpoint")
    value = f"{base / artifact:.1f}× smaller" if base >= artifact else f"{artifact / base:.1f}× larger"
    return Figure("Size", value, text)


def _bits(report: Report) -> Figure | None:
    found = _both(report, "bpw")
    if found is None:
        return None
    _, text, base, artifact = found
    said = "quantized ones, with scales"
    return Figure("Bits per weight", sig3(artifact), said if base is None else f"{text}, {said}")


def _accuracy(report: Report) -> Figure | None:
    delta, recovery = _first(report, "acc_delta", POOLED), _first(report, "recovery", POOLED)
    parts = [] if recovery is None else [f"recovery {shown(SPECS['recovery'], recovery[1]['pair']['value'])}"]
    if delta is not None:
        row = delta[1]["pair"]
        return Figure(
            "Accuracy", show_points(row["value"]), ", ".join([_interval("acc_delta", row), *parts]).strip(", ")
        )
    if recovery is not None:
        row = recovery[1]["pair"]
        return Figure("Recovery", shown(SPECS["recovery"], row["value"]), _interval("recovery", row))
    return None


def _perplexity(report: Report) -> Figure | None:
    found = _both(report, "perplexity")
    if found is None:
        return None
    where, text, base, artifact = found
    if base is None:
        return Figure("Perplexity", text, where)
    return Figure("Perplexity", show_change(base, artifact), f"{text}, {where}")


def _divergence(report: Report) -> Figure | None:
    found = _first(report, "kld_mean")
    if found is None:
        return None
    where, rows = found
    tail = _first(report, "kld_p99")
    parts = [where] if tail is None else [f"p99 {sig3(tail[1]['pair']['value'])}", where]
    return Figure("KL divergence", f"{sig3(rows['pair']['value'])} nats", ", ".join(["mean", *parts]))


def _decode(report: Report) -> Figure | None:
    found = _both(report, "decode_tok_s")
    if found is None:
        return None
    where, text, base, artifact = found
    if base is None:
        return Figure("Decode speed", f"{text} tok/s", where)
    return Figure("Decode speed", show_ratio(base, artifact), f"{text} tok/s, {where}")


def _interval(metric: str, row: Row) -> str:
    text = show_range(SPECS[metric], row)
    return f"95% interval {text}" if text else ""


def badge(report: Report) -> Badge:
    """The verdict in words; also what to say where there is none."""
    verdict = report["verdict"]
    if verdict is None:
        why = "There is nothing to compare with." if lone(report) else "Too little was measured to give one."
        return Badge("No verdict", "none", "–", why, "", ())
    word, tone, sign = _OUTCOMES[verdict["overall"]]
    tasks = [(name, _outcome(value)) for name, value in verdict["tasks"].items()]
    return Badge(word, tone, sign, _reason(verdict), verdict.get("rule", ""), tuple(tasks))


def _reason(verdict: dict[str, Any]) -> str:
    """What changed, within which range, against which margin."""
    accuracy = verdict["basis"] == "accuracy"
    show = show_points if accuracy else signed(lambda size: f"{size:.3g}")
    what = "Accuracy changed by" if accuracy else "The log of the perplexity ratio is"
    margin = verdict["delta"]
    against = "" if margin is None else f"the margin is {f'{100 * margin:.3g} pp' if accuracy else f'{margin:.3g}'}"
    value, low, high = (verdict.get(key) for key in ("value", "low", "high"))
    margin_said = f"; {against}" if against else ""
    needs = (verdict.get("needs") or {}).get("overall") if verdict["overall"] == "undecided" else None
    if needs:
        margin_said += f"; about {sig3(needs)} more {verdict.get('cases', 'cases')} would decide"
    range_ = "" if low is None or high is None else f" (95% interval {show(low)} to {show(high)})"
    return (f"By {verdict['basis']}" if value is None else f"{what} {show(value)}{range_}") + f"{margin_said}."


def _outcome(value: Any) -> str:
    """The outcome of a task: a word, or an object that has it as `overall`."""
    word = value.get("overall", value.get("outcome", "")) if isinstance(value, dict) else value
    known = _OUTCOMES.get(str(word))
    return known[0].lower() if known else str(word).replace("_", " ")


def words(value: Any) -> str:
    """A value of the document as text: lists with commas."""
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
