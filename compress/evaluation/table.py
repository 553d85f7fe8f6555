"""Rows as lines of a table, as text: base and artifact side by side, what changed, and within which range."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compress.evaluation.metrics import Row
from compress.evaluation.report import Report
from compress.evaluation.rows import DIVERGENCE, POOLED, SPECS, Group, Spec, groups, headline, lone, place
from compress.evaluation.text import MISSING, plain, show_percent, sig3

WIDTH = 80
_SHORT = (
    "size_bytes", "bpw", "acc", "acc_norm", "acc_delta", "flips", "recovery", "perplexity", "word_perplexity",
    "kld_mean", "kld_p99", "top1_agreement", "greedy_agreement", "repetition", "prefill_tok_s", "decode_tok_s",
    "peak_memory_bytes", "load_s",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a table, as text. A pair's value is the `change`; its `base` and `artifact` are empty."""

    label: str
    base: str
    artifact: str
    change: str
    base_range: str = ""
    artifact_range: str = ""
    change_range: str = ""
    n: str = MISSING

    @property
    def spread(self) -> str:
        """The range of the artifact's value, or of the value that compares both."""
        return self.change_range or self.artifact_range or MISSING


def lines(report: Report, specs: Iterable[Spec]) -> list[Line]:
    """One line for each metric, task and condition."""
    found: list[Line] = []
    for spec in specs:
        made = [_line(spec, group.label, group.rows) for group in groups(report, spec)]
        wanted = spec.always and not (spec.pair and lone(report))
        found += made or ([_line(spec, spec.label, {})] if wanted else [])
    return found


def _line(spec: Spec, label: str, rows: dict[str, Row]) -> Line:
    base, artifact, pair = (rows.get(subject, {}).get("value") for subject in ("base", "artifact", "pair"))
    main = rows.get("pair" if spec.pair else "artifact") or next(iter(rows.values()), None)
    n = f"{main['n']:,}" if main and main["n"] is not None else MISSING
    if spec.pair:
        return Line(label, "", "", shown(spec, pair), change_range=show_range(spec, rows.get("pair")), n=n)
    change = MISSING if base is None or artifact is None else spec.change(base, artifact)
    return Line(label, shown(spec, base), shown(spec, artifact), change, show_range(spec, rows.get("base")),
                show_range(spec, rows.get("artifact")), n=n)  # fmt: skip


def shown(spec: Spec, value: float | None) -> str:
    """A value as the metric shows it."""
    return MISSING if value is None else spec.show(value)


def show_range(spec: Spec, row: Row | None) -> str:
    """From low to high, or nothing where there is no range; a unit that both share is said once."""
    if row is None or row["low"] is None or row["high"] is None:
        return ""
    low, high = spec.show(row["low"]), spec.show(row["high"])
    unit = re.search(r"( ?[^\d.,e+-]+)$", high)
    if unit and low.endswith(unit.group()):
        low = low.removesuffix(unit.group())
    return f"{low} to {high}" if re.search("[+−-]", low + high) else f"{low} – {high}"


@dataclass(frozen=True)
class TaskLine:
    """The accuracy of one task: both values, their difference, how many answers changed, how sure that is; as text.

    `p` is McNemar's, of a task after Holm's correction; `smallest` the difference that the documents would have shown.
    """

    task: str
    metric: str
    base: str
    base_range: str
    artifact: str
    artifact_range: str
    change: str
    change_range: str
    flips: str
    p: str
    smallest: str
    n: str
    main: bool  # the task's main metric
    all: bool = False  # stands for all tasks


def task_lines(report: Report) -> list[TaskLine]:
    """A line for each task and metric; the paired difference stands beside the task's main metric.

    What was measured of pairs alone, as for all tasks together, comes last.
    """
    main = headline(report)
    pairs: dict[str, dict[str, Row]] = {}
    for row in report["measurements"]:
        if row["metric"] in ("acc_delta", "flips", "mcnemar_p", "smallest_difference"):
            pairs.setdefault(row["task"], {}).setdefault(row["metric"], row)
    found = []
    for metric in ("acc", "acc_norm"):
        for group in groups(report, SPECS[metric]):
            is_main = main[group.task] == metric
            pair = pairs.get(group.task, {}) if is_main else {}
            found.append((group.task, _task_line(metric, group, pair, is_main)))
    order = list(main)
    found.sort(key=lambda item: order.index(item[0]))
    return [line for _, line in found] + [_pair_line(task, pair) for task, pair in pairs.items() if task not in main]


def _task_line(metric: str, group: Group, pair: dict[str, Row], main: bool) -> TaskLine:
    line = _line(SPECS[metric], group.label, group.rows)
    change, change_range = line.change, ""
    if "acc_delta" in pair and pair["acc_delta"]["value"] is not None:
        change, change_range = _show_delta(pair)
    return TaskLine(group.where or group.task, metric.replace("_", " "), line.base, line.base_range, line.artifact,
                    line.artifact_range, change, change_range, show_flips(pair.get("flips")), *_show_tests(pair),
                    line.n, main)  # fmt: skip


def _pair_line(task: str, pair: dict[str, Row]) -> TaskLine:
    n = next(iter(pair.values()))["n"]
    return TaskLine(task, "", MISSING, "", MISSING, "", *_show_delta(pair), show_flips(pair.get("flips")),
                    *_show_tests(pair), MISSING if n is None else f"{n:,}", main=True, all=task == POOLED)  # fmt: skip


def _show_delta(pair: dict[str, Row]) -> tuple[str, str]:
    delta = pair.get("acc_delta")
    spec = SPECS["acc_delta"]
    return shown(spec, delta["value"] if delta else None), show_range(spec, delta)


def _show_tests(pair: dict[str, Row]) -> tuple[str, str]:
    """The p-value, corrected where there are many tasks, and the smallest difference."""
    tested, smallest = pair.get("mcnemar_p"), pair.get("smallest_difference")
    p = None if tested is None else tested["context"].get("holm", tested["value"])
    value = None if smallest is None else smallest["value"]
    return MISSING if p is None else sig3(p), MISSING if value is None else f"{100 * value:.1f} pp"


def show_flips(row: Row | None) -> str:
    """How many answers the artifact lost and gained, else their share."""
    if row is None or row["value"] is None:
        return MISSING
    gained, lost = row["context"].get("gained"), row["context"].get("lost")
    return show_percent(row["value"]) if gained is None or lost is None else f"{lost} lost, {gained} gained"


@dataclass(frozen=True)
class Grid:
    """A table with a column for each metric and a line for each text."""

    columns: list[str]
    lines: list[tuple[str, list[tuple[str, str]], str]]  # text, (value, range) of each column, n


def points(report: Report, specs: Iterable[Spec]) -> Grid:
    """Some metrics of speed side by side, a line for each point of the grid and model."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    seen = []
    for spec in specs:
        found = [g for g in groups(report, spec) if any(row["value"] is not None for row in g.rows.values())]
        seen += [spec] if found else []
        for group in found:
            for subject, row in group.rows.items():
                cells.setdefault((group.where, subject), {})[spec.metric] = row
    made = []
    for (where, subject), rows in cells.items():
        line = [(shown(spec, rows[spec.metric]["value"]) if spec.metric in rows else MISSING, "") for spec in seen]
        counts = [row["n"] for row in rows.values() if row["n"] is not None]
        name = where if lone(report) else f"{where}, {subject}"
        made.append((name, line, f"{max(counts):,}" if counts else MISSING))
    return Grid([spec.label for spec in seen], made)


def divergence(report: Report) -> Grid:
    """How far the predictions are from the base's: mean and percentiles side by side, a line for each text."""
    cells: dict[str, dict[str, Row]] = {}
    names: dict[str, str] = {}
    for metric in DIVERGENCE:
        for group in groups(report, SPECS[metric]):
            if "pair" in group.rows:
                key = place(group.rows["pair"])
                cells.setdefault(key, {})[metric] = group.rows["pair"]
                names.setdefault(key, group.where or group.task)
    seen = [metric for metric in DIVERGENCE if any(metric in found for found in cells.values())]
    made = []
    for key, found in cells.items():
        line = [(shown(SPECS[m], found[m]["value"]), show_range(SPECS[m], found[m])) if m in found else (MISSING, "")
                for m in seen]  # fmt: skip
        n = next(iter(found.values()))["n"]
        made.append((names[key], line, MISSING if n is None else f"{n:,}"))
    return Grid([SPECS[metric].label for metric in seen], made)


@dataclass(frozen=True)
class PositionLine:
    """Perplexity of both at some positions of a text's windows, and the log of their ratio; as text."""

    where: str
    positions: str
    base: str
    artifact: str
    change: str
    change_range: str
    n: str


def position_lines(report: Report) -> list[PositionLine]:
    """Perplexity by position in the window: a line for each text and class of positions."""
    changes = {place(g.rows["pair"]): g.rows["pair"] for g in groups(report, SPECS["nll_delta"]) if "pair" in g.rows}
    found = []
    for group in groups(report, SPECS["perplexity"]):
        rows = {**group.rows, "pair": changes.get(place(next(iter(group.rows.values()))), {})}
        parts = {subject: {p["from"]: p for p in by_position(row)} for subject, row in rows.items()}
        for known in by_position(rows.get("artifact")):
            base, pair = (parts.get(subject, {}).get(known["from"]) for subject in ("base", "pair"))
            change = shown(SPECS["nll_delta"], pair["nats"] if pair else None)
            found.append(
                PositionLine(group.where or group.task, position_label(known), _exp(base), _exp(known), change,
                             show_range(SPECS["nll_delta"], pair), f"{known['n']:,}")
            )  # fmt: skip
    return found


def by_position(row: Row | None) -> list[dict[str, Any]]:
    """What a row says of classes of positions; nothing where it says nothing, or not as `fidelity` writes it."""
    parts = row.get("context", {}).get("by_position") if row else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return []
    whole = [p for p in parts if all(isinstance(p.get(key), int | float) for key in ("from", "to", "n", "nats"))]
    return [{"low": None, "high": None, **part} for part in whole]


def position_label(part: dict[str, Any]) -> str:
    """A class of positions as text: "17–32"."""
    return f"{part['from']:,}–{part['to']:,}"


def _exp(part: dict[str, Any] | None) -> str:
    return MISSING if part is None else sig3(math.exp(min(part["nats"], 700.0)))


def summary_lines(report: Report) -> list[Line]:
    """The short table's lines: size, quality, speed, memory.

    Of a task only its main accuracy, of a difference only the pooled one where there is one.
    """
    main = headline(report)
    pooled = {row["metric"] for row in report["measurements"] if row["task"] == POOLED}
    found: list[Line] = []
    for spec in (SPECS[metric] for metric in _SHORT):
        if spec.metric in ("acc", "acc_norm"):
            kept = [group for group in groups(report, spec) if main[group.task] == spec.metric]
            found += [_line(spec, f"accuracy, {group.where}", group.rows) for group in kept]
        elif spec.metric in pooled:
            kept = [group for group in groups(report, spec) if group.task == POOLED]
            found += [_line(spec, group.label, group.rows) for group in kept]
        else:
            found += lines(report, [spec])
    return found


def summary_table(report: Report) -> str:
    """The short table as text, at most 80 columns wide."""
    rows = [("", "base", "artifact", "change")]
    rows += [(line.label, line.base, line.artifact, line.change) for line in summary_lines(report)]
    if lone(report):
        rows = [(label, "", "", artifact) for label, _, artifact, _ in rows]
    rest = 12
    first = WIDTH - 3 * (rest + 2)
    text = []
    for label, *cells in rows:
        head = plain(label) if len(plain(label)) <= first else plain(label)[: first - 1] + "…"
        text.append((head.ljust(first) + "".join(f"  {cell:>{rest}}" for cell in cells)).rstrip())
    text.insert(1, "─" * WIDTH)
    return "\n".join(text)
