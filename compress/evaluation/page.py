"""report.html: the report as one page that needs no network."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.evaluation.report import Report
from compress.evaluation.rows import ACCURACY, COST, LIKELIHOOD, conditions
from compress.evaluation.table import lines
from compress.evaluation.text import show_percent, sig3

_TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Bar:
    """A bar of the chart in its own units (the drawing is `CHART` wide and high)."""

    x: float
    y: float
    width: float
    height: float
    title: str


CHART = (720, 180)


def block_bars(report: Report) -> tuple[list[Bar], float]:
    """The bars of the error by block, in the model's order, and the highest error (0 without any)."""
    rows = [row for row in report["measurements"] if row["metric"] == "block_error" and row["value"] is not None]
    rows.sort(key=lambda row: [int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", row["task"])])
    top = max((row["value"] for row in rows), default=0.0)
    step = CHART[0] / max(len(rows), 1)
    bars = []
    for index, row in enumerate(rows):
        height = CHART[1] * max(row["value"], 0.0) / top if top > 0 else 0.0
        title = f"{row['task']}: {sig3(row['value'])}"
        bars.append(Bar(round(index * step, 2), round(CHART[1] - height, 2), round(step * 0.8, 2),
                        round(height, 2), title))  # fmt: skip
    return bars, top


def disturbed(report: Report) -> str | None:
    """The smallest share of its own threads' time that a speed worker got, where that is under 80%."""
    shares = [row["context"]["cpu_share"] for row in report["measurements"] if "cpu_share" in row["context"]]
    return show_percent(min(shares)) if shares and min(shares) < 0.8 else None


def html(report: Report, recipe_yaml: str, plan_text: str) -> str:
    """The report as one page: no network, no scripts, everything untrusted escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    bars, top = block_bars(report)
    return environment.get_template("report.html.j2").render(
        report=report, facts=facts(report), fidelity=lines(report, [*LIKELIHOOD, *ACCURACY]), cost=lines(report, COST),
        bars=bars, top=sig3(top), chart=CHART, notes=report["artifact"].get("notes") or [],
        conditions=conditions(report), disturbed=disturbed(report), skipped=_skipped(report),
        recipe_yaml=recipe_yaml, plan_text=plan_text,
    )  # fmt: skip


def facts(report: Report) -> list[tuple[str, str]]:
    facts = [("artifact", report["artifact"]["name"]), ("base", report["base"]["name"])]
    facts += [(f"base {key}", str(report["base"][key])) for key in ("revision", "architecture")
              if report["base"].get(key)]  # fmt: skip
    facts += [(key, _words(report["artifact"][key])) for key in ("recipe", "method", "scheme", "format")
              if report["artifact"].get(key)]  # fmt: skip
    return facts


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _skipped(report: Report) -> list[str]:
    found: dict[str, None] = {}
    for row in report["measurements"]:
        if "skipped" in row["context"]:
            where = {"batch": "?", "context": "?", "output": "?", **row["conditions"]}
            found["{batch}×{context}+{output}: ".format(**where) + str(row["context"]["skipped"])] = None
    return list(found)
