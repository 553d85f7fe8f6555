"""Several checkpoints side by side, each against the same base on the same terms: a line for each.

What is put in one table has to be measured alike: same base, tasks and documents, same text and prompts, same runtime,
dtype and batch, and a verdict that rests on the same figures and margin. A condition that tells of the checkpoint
itself (how it quantizes activations) may differ; any other that does is named, and such reports stand side by side
only where that was asked for, marked.
"""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from compress.evaluation.figures import badge
from compress.evaluation.metrics import Row
from compress.evaluation.report import Report
from compress.evaluation.rows import POOLED, SPECS
from compress.evaluation.table import WIDTH, show_range, shown
from compress.evaluation.text import MISSING, plain

_OWN = ("activations", "kv_cache")  # conditions that belong to the checkpoint
_ALIKE = (
    "acc", "acc_norm", "acc_delta", "recovery", "perplexity", "kld_mean", "greedy_agreement", "repetition",
    "prefill_tok_s", "decode_tok_s",
)  # fmt: skip
_SPEED = ("prefill_tok_s", "decode_tok_s")  # which some checkpoints cannot be asked for here
_TEMPLATES = Path(__file__).resolve().parent / "templates"
_VERDICT = len("  non-inferior")
_NAME = 34  # columns of the longest name that is shown whole
# What a column shows: its head, the metric, whose value, which task (None: the first there is), its width.
_COLUMNS = (
    ("size", "size_bytes", "artifact", None, 8), ("Δ accuracy", "acc_delta", "pair", POOLED, 10),
    ("recovery", "recovery", "pair", POOLED, 8), ("ppl", "perplexity", "artifact", None, 6),
    ("KLD", "kld_mean", "pair", None, 8), ("tok/s", "decode_tok_s", "artifact", None, 5),
    ("agreement", "greedy_agreement", "pair", None, 9), ("repeats", "repetition", "artifact", None, 7),
)  # fmt: skip
_WRITTEN = (
    "agreement: tokens that checkpoint and base both write after a prompt before the first that differs, mean; "
    "repeats: share of tokens that end a 4-gram seen before in the same text"
)


@dataclass(frozen=True)
class Cell:
    """A value as text, and its interval."""

    value: str
    range: str


@dataclass(frozen=True)
class Beside:
    """The table: its columns' heads; of each checkpoint name, cells and verdict; what was measured otherwise."""

    heads: list[str]
    lines: list[tuple[str, list[Cell], str]]
    differences: list[str]


def differences(reports: Mapping[str, Report]) -> list[str]:
    """What was not measured alike, a sentence each; empty when everything was."""
    terms = {name: _terms(report) for name, report in reports.items()}
    found = []
    for what in dict.fromkeys(what for known in terms.values() for what in known):
        metric = what.partition(",")[0]
        absent = [
            name
            for name, known in terms.items()
            if what not in known and not (metric in _SPEED and reports[name]["artifact"].get("untimed"))
        ]
        said = {name: known[what] for name, known in terms.items() if what in known}
        if absent:
            found.append(f"{what}: not measured of {', '.join(absent)}")
        first, *others = said.items()
        for name, conditions in others:
            keys = [k for k in {**first[1], **conditions} if first[1].get(k) != conditions.get(k)]
            if keys:
                one, other = ({k: c.get(k) for k in keys} for c in (first[1], conditions))
                found.append(f"{what}: {first[0]} {json.dumps(one)}, {name} {json.dumps(other)}")
    return found


def _terms(report: Report) -> dict[str, dict[str, Any]]:
    """What has to be alike: base and verdict, and the conditions of each metric's tasks and points of the grid."""
    verdict = report["verdict"]
    found = {"base": {key: report["base"].get(key) for key in ("name", "revision")}}
    if verdict is not None:
        found["verdict"] = {key: verdict[key] for key in ("basis", "delta")}
    rows = [row for row in report["measurements"] if row["subject"] != "base" and row["task"] != "heldout"]
    for metric in _ALIKE:
        for row in sorted((row for row in rows if row["metric"] == metric), key=lambda row: str(row["task"])):
            where = {k: v for k, v in row["conditions"].items() if k not in _OWN}
            point = [str(where[key]) for key in ("batch", "context", "output") if key in where]
            found[f"{metric}, {row['task']} {'×'.join(point)}".strip()] = where
    return found


def beside(reports: Mapping[str, Report], apart: Sequence[str] = ()) -> Beside:
    """The table of reports by name; `apart` are the differences that were allowed."""
    lines = [
        (name, [_cell(report, metric, subject, task) for _, metric, subject, task, _ in _COLUMNS], _outcome(report))
        for name, report in reports.items()
    ]
    kept = [i for i in range(len(_COLUMNS)) if any(cells[i].value != MISSING for _, cells, _ in lines)]
    base = [
        _base_cell(reports.values(), metric, task) if subject == "artifact" else Cell("", "")
        for _, metric, subject, task, _ in _COLUMNS
    ]
    every = [(str(next(iter(reports.values()))["base"]["name"]), base, "base"), *lines]
    shown_lines = [(name, [cells[i] for i in kept], said) for name, cells, said in every]
    return Beside([_COLUMNS[i][0] for i in kept], shown_lines, list(apart))


def _outcome(report: Report) -> str:
    found = badge(report)
    return MISSING if found.tone == "none" else found.word.lower()


def _cell(report: Report, metric: str, subject: str, task: str | None) -> Cell:
    row = _row(report, metric, subject, task)
    if row is None:
        return Cell(MISSING, "")
    return Cell(shown(SPECS[metric], row["value"]), show_range(SPECS[metric], row))


def _base_cell(reports: Iterable[Report], metric: str, task: str | None) -> Cell:
    """The base's value in the first report that has it."""
    cells = [_cell(report, metric, "base", task) for report in reports]
    return next((cell for cell in cells if cell.value != MISSING), cells[0])


def _row(report: Report, metric: str, subject: str, task: str | None) -> Row | None:
    """The metric's row of a task, else its first that is of a suite's measuring and not of the walk's."""
    rows = [r for r in report["measurements"] if (r["metric"], r["subject"]) == (metric, subject)]
    wanted = [r for r in rows if r["task"] == task] or [r for r in rows if r["task"] != "heldout"]
    return wanted[0] if wanted else None


def text(table: Beside) -> str:
    """The table at most 80 columns wide, in several parts where that takes them; only very long names are cut."""
    widths = {head: width for head, *_, width in _COLUMNS}
    names = [plain(name) for name, _, _ in table.lines]
    first = min(max(map(len, names)), _NAME)
    room, parts = WIDTH - first - _VERDICT, [list[int]()]
    for i, head in enumerate(table.heads):
        if room < widths[head] + 2:
            room = WIDTH - first
            parts.append([])
        parts[-1].append(i)
        room -= widths[head] + 2
    made = []
    for part in parts:
        last = part is parts[0]
        heads = "".join(f"  {table.heads[i]:>{widths[table.heads[i]]}}" for i in part)
        made += [" " * first + heads + ("  verdict" if last else ""), "─" * WIDTH]
        for name, (_, cells, said) in zip(names, table.lines, strict=True):
            head = name if len(name) <= first else name[: first - 1] + "…"
            values = "".join(f"  {cells[i].value:>{widths[table.heads[i]]}}" for i in part)
            made.append(f"{head:<{first}}{values}{'  ' + said if last else ''}".rstrip())
        made.append("")
    return "\n".join([*made[:-1], *textwrap.wrap(written(table), WIDTH)])


def written(table: Beside) -> str:
    """What the columns of generation mean; nothing where there are none."""
    return _WRITTEN if "agreement" in table.heads else ""


def html(table: Beside, links: Mapping[str, str]) -> str:
    """The table as one page that needs no network; `links` are paths that lead from names to reports."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template("beside.html.j2").render(
        table=table, links={name: quote(link) for name, link in links.items()}, style=style, written=written(table)
    )
