"""report.html: the report as one page that needs no network.

The idea: the page answers in the order in which people ask. What is it; is it good enough; how small and how
fast; and then why. Tables hold every number; charts stand beside them where a suite has measured (`draw`), and
turn with the reader's light or dark. Without scripts the page is the tables.

Everything in it but our own template comes from strangers: text is escaped by the template engine, data in
scripts by `_data`, and a Content-Security-Policy lets only our two scripts run, by their hashes, and nothing be
fetched. Vega interprets its expressions (`ast`), so no text is ever evaluated as code.

Left out: fonts and pictures: the reader's own fonts do, and the charts are drawn by the script.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.evaluation.draw import Drawn
from compress.evaluation.figures import badge, figures, words
from compress.evaluation.generation import Written, alike
from compress.evaluation.report import Report
from compress.evaluation.rows import (
    COST,
    DIVERGENCE,
    GENERATION,
    LATENCY,
    LIKELIHOOD,
    LIMITS,
    SPECS,
    block_errors,
    conditions,
    lone,
)
from compress.evaluation.table import divergence, lines, points, position_lines, task_lines
from compress.evaluation.text import show_percent, sig3

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_TEXTS = 4  # shown of what both models wrote
_ACCURACY = ("acc", "acc_norm", "acc_delta", "flips", "recovery")


def html(
    report: Report,
    recipe_yaml: str | None,
    plan_text: str | None,
    drawn: Drawn | None = None,
    texts: Sequence[Written] = (),
) -> str:
    """The report as one page.

    Args:
        recipe_yaml, plan_text: what was asked and what was done; None leaves the section out.
        drawn: the charts; None makes a page of tables.
        texts: what both models wrote; the first few are shown.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    charts = {chart.name: chart for chart in drawn.charts} if drawn else {}
    tasks, verdict = task_lines(report), badge(report)
    outcomes = {task: outcome for task, outcome in verdict.tasks if any(line.task == task for line in tasks)}
    boot = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    scripts = [_script(drawn.script), _script(boot)] if drawn else []
    return environment.get_template("report.html.j2").render(
        report=report, lone=lone(report), style=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        policy=_policy(scripts), scripts=scripts, charts=charts,
        data=_data({name: chart.spec for name, chart in charts.items()}), facts=facts(report), badge=verdict,
        figures=figures(report), verified=_verified(report), tasks=tasks, outcomes=outcomes,
        other_tasks=[pair for pair in verdict.tasks if pair[0] not in outcomes],
        likelihood=lines(report, [spec for spec in LIKELIHOOD if spec.metric not in DIVERGENCE]),
        recovery=lines(report, [SPECS["recovery"]]), divergence=divergence(report), positions=position_lines(report),
        generation=lines(report, GENERATION), texts=_texts(texts),
        cost=lines(report, COST), blocks=_blocks(report), shared_accuracy=_shared(report, _ACCURACY),
        shared_speed=_shared(report, ("prefill_tok_s", "decode_tok_s")),
        latency=points(report, LATENCY), limits=points(report, LIMITS), absent=_absent(report),
        steps=any(row["metric"] == "itl_s" for row in report["measurements"]),
        notes=report["artifact"].get("notes") or [], conditions=conditions(report), disturbed=_disturbed(report),
        skipped=_skipped(report), recipe_yaml=recipe_yaml, plan_text=plan_text,
    )  # fmt: skip


def _texts(texts: Sequence[Written]) -> list[dict[str, str | None]]:
    """The first few texts, what both models wrote alike apart from what each wrote then."""
    found = []
    for text in texts[:_TEXTS]:
        artifact, base = _lines(text.artifact), None if text.base is None else _lines(text.base)
        same = "" if base is None else base[: alike(base, artifact)]
        own = None if base is None else base[len(same) :]
        found.append({"kind": _lines(text.kind), "prompt": _lines(text.prompt), "same": same, "base": own,
                      "artifact": artifact[len(same) :]})  # fmt: skip
    return found


def _lines(text: str) -> str:
    """Text with its line breaks, and a sign in place of what cannot be shown."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def facts(report: Report) -> list[tuple[str, str]]:
    """What was made of what, as words."""
    base, artifact = report["base"], report["artifact"]
    found = [("base", words(base["name"]))] if base["name"] is not None else []
    found += [(f"base {key}", words(base[key])) for key in ("revision", "architecture") if base.get(key)]
    keys = ("recipe", "method", "scheme", "format")
    return found + [(key, words(artifact[key])) for key in keys if artifact.get(key)]


def _verified(report: Report) -> list[tuple[str, str]]:
    """What the reload found; the tokens that it generated are of no use to a reader."""
    found = (report["verified"] or {}).items()
    return [(key.replace("_", " "), sig3(value) if isinstance(value, float) else words(value))
            for key, value in found if key != "generated"]  # fmt: skip


def _blocks(report: Report) -> list[tuple[str, str, float]]:
    """Each block with its error, as text and as a share of the highest: a bar that needs no script."""
    rows = block_errors(report)
    top = max((row["value"] for row in rows), default=0)
    return [(row["task"], sig3(row["value"]), round(100 * max(row["value"], 0) / top, 1) if top > 0 else 0)
            for row in rows]  # fmt: skip


def _shared(report: Report, metrics: tuple[str, ...]) -> str:
    """The conditions that all rows of these metrics share, as one line."""
    rows = [row["conditions"] for row in report["measurements"] if row["metric"] in metrics]
    if not rows:
        return ""
    same = [key for key in rows[0] if all(row.get(key) == rows[0][key] for row in rows)]
    return " · ".join(f"{key.replace('_', ' ')} {words(rows[0][key])}" for key in same)


def _disturbed(report: Report) -> str | None:
    """The smallest share of its own threads' time that a speed worker got, where that is under 80%."""
    shares = [row["context"]["cpu_share"] for row in report["measurements"] if "cpu_share" in row["context"]]
    return show_percent(min(shares)) if shares and min(shares) < 0.8 else None


def _skipped(report: Report) -> list[str]:
    found: dict[str, None] = {}
    for row in report["measurements"]:
        if "skipped" in row["context"]:
            where = {"batch": "?", "context": "?", "output": "?", **row["conditions"]}
            found["{batch}×{context}+{output}: ".format(**where) + str(row["context"]["skipped"])] = None
    return list(found)


def _absent(report: Report) -> list[str]:
    """What was not measured, and why."""
    return list(dict.fromkeys(str(r["context"]["absent"]) for r in report["measurements"] if "absent" in r["context"]))


# --- what stands in scripts ---


def _data(value: Any) -> Any:
    """JSON that nothing in it can end: no tag and no comment begins without "<"."""
    from markupsafe import Markup

    text = json.dumps(value)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _script(code: str) -> Any:
    """Our own code between script tags; it must hold nothing that ends them."""
    from markupsafe import Markup

    assert "</script" not in code.lower(), "the script would end itself"
    assert "<!--" not in code, "the script would begin a comment"
    return Markup(code.replace("\r\n", "\n"))  # as the reader's parser will: the hash is of that


def _policy(scripts: list[Any]) -> str:
    """Our scripts may run, by their hashes, and nothing may be fetched. Tooltips need styles of their own."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
