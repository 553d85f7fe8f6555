"""The report: one document of rows beside every artifact, and the pages made from it.

The idea: `report.json` is the only thing that is kept. The table, the HTML page and the model card are pure
functions of it (and of the recipe's and the plan's text), so that they can be made again at any time and can
never disagree with it. A value that was not measured is shown as "–"; a value that is no number (a broken
model's perplexity) is stored as null with the word in `context["not_finite"]`.

Names, notes and texts come from strangers' checkpoints: HTML is escaped by the template engine, Markdown by
`markdown`, the front matter by YAML, code fences by being longer than what they hold.

Left out: charts over many artifacts (pareto), scripts, fonts and pictures: the page is one file
without network.
"""

import html as html_module
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CompressError
from compress.evaluation.metrics import Row
from compress.files import replace

Report = dict[str, Any]

SCHEMA = 1
FILE = "report.json"
MISSING = "–"
WIDTH = 80
_KEYS = {"schema", "artifact", "base", "verified", "verdict", "measurements"}
_ROW_KEYS = {"metric", "subject", "task", "value", "unit", "low", "high", "n", "conditions", "context"}
_OVERALL = ("non_inferior", "worse", "undecided")
_TEMPLATES = Path(__file__).resolve().parent / "templates"


# --- the document ---


def build(
    *,
    artifact: dict[str, Any],
    base: dict[str, Any],
    measurements: Iterable[Row],
    verified: dict[str, Any] | None = None,
    verdict: dict[str, Any] | None = None,
) -> Report:
    """A report from its parts.

    Args:
        artifact: `name`, and where known `recipe`, `method`, `scheme`, `format`, `notes` (named fallbacks and
            what else happened, as sentences).
        base: `name`, and where known `revision`, `architecture`.
        measurements: rows of `metrics.row`.
        verified: what the reload found; null before it ran.
        verdict: overall, delta, basis, tasks; null until it can be given.
    """
    report = {
        "schema": SCHEMA, "artifact": artifact, "base": base, "verified": verified, "verdict": verdict,
        "measurements": list(measurements),
    }  # fmt: skip
    problem = _problem(report)
    assert problem is None, problem
    return report


def write(folder: Path, report: Report) -> Path:
    """Write `folder/report.json`, whole or not at all; its path."""
    path = folder / FILE
    report = {**report, "measurements": [_finite(row) for row in report["measurements"]]}
    replace(path, (json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return path


def read(folder: Path) -> Report:
    """The report of the artifact in `folder`.

    Raises:
        CompressError: no report there, no JSON, another schema, or a part of it missing.
    """
    path = folder / FILE
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompressError(f"No report can be read here: {error.strerror}", where=str(path),
                            hint="give the folder of a finished artifact") from error  # fmt: skip
    except ValueError as error:
        raise CompressError(f"The report is no JSON: {error}", where=str(path),
                            hint="make the artifact's report again") from error  # fmt: skip
    problem = _problem(report)
    if problem:
        hint = "make the artifact's report again, or use the version that wrote it"
        raise CompressError(f"The report is not valid: {problem}", where=str(path), hint=hint)
    return dict(report)


def _problem(report: Any) -> str | None:
    """What is wrong with a report's structure; None when nothing is."""
    if not isinstance(report, dict):
        return "it is not an object"
    if report.get("schema") != SCHEMA:
        return f"schema {report.get('schema')!r}; this version reads {SCHEMA}"
    if set(report) != _KEYS:
        return f"keys missing or unknown: {', '.join(sorted(set(report) ^ _KEYS))}"
    for part in ("artifact", "base"):
        if not isinstance(report[part], dict) or not isinstance(report[part].get("name"), str):
            return f"{part} must be an object with a name"
    for part in ("verified", "verdict"):
        if not isinstance(report[part], dict | None):
            return f"{part} must be an object or null"
    if report["verdict"] is not None and report["verdict"].get("overall") not in _OVERALL:
        return f"verdict.overall must be one of {', '.join(_OVERALL)}"
    if not isinstance(report["measurements"], list):
        return "measurements must be a list"
    problems = (_row_problem(index, row) for index, row in enumerate(report["measurements"]))
    return next((problem for problem in problems if problem), None)


def _row_problem(index: int, row: Any) -> str | None:
    if not isinstance(row, dict) or set(row) != _ROW_KEYS:
        return f"measurements[{index}] must have exactly the keys {', '.join(sorted(_ROW_KEYS))}"
    if not isinstance(row["metric"], str) or not isinstance(row["task"], str):
        return f"measurements[{index}]: metric and task must be text"
    if row["subject"] not in ("base", "artifact", "pair"):
        return f"measurements[{index}]: subject must be base, artifact or pair"
    if not all(isinstance(row[key], int | float | None) for key in ("value", "low", "high", "n")):
        return f"measurements[{index}]: value, low, high and n must be numbers or null"
    if not isinstance(row["conditions"], dict) or not isinstance(row["context"], dict):
        return f"measurements[{index}]: conditions and context must be objects"
    return None


def _finite(row: Row) -> Row:
    """JSON has no inf and nan: null, and the word in the context."""
    odd = {key: str(row[key]) for key in ("value", "low", "high")
           if isinstance(row[key], float) and not math.isfinite(row[key])}  # fmt: skip
    if not odd:
        return row
    return {**row, **dict.fromkeys(odd), "context": {**row["context"], "not_finite": odd}}


# --- numbers as text ---


def sig3(value: float) -> str:
    """Three significant digits: 1234.5 → "1,230", 0.01234 → "0.0123", 0.00000123 → "1.23e-06"."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    digits = 2 - math.floor(math.log10(abs(rounded)))  # 9.999 has become 10.0
    return f"{rounded:,.{max(0, digits)}f}"


def show_bytes(value: float) -> str:
    """Decimal units, as disks and hubs count: 538000000 → "538 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{sig3(value / size)} {unit}"
    return f"{value:.0f} B"


def show_seconds(value: float) -> str:
    """0.0123 → "12.3 ms"."""
    return f"{sig3(value)} s" if abs(value) >= 0.9995 else f"{sig3(value * 1000)} ms"


def show_percent(value: float) -> str:
    """A fraction in percent: 0.9912 → "99.1%"."""
    return f"{sig3(value * 100)}%"


def show_ratio(base: float, artifact: float) -> str:
    """artifact ÷ base: "0.29×"; nothing to divide by: "–"."""
    if base == 0:
        return MISSING
    ratio = artifact / base
    return f"{ratio:.2f}×" if 0.1 <= abs(ratio) < 100 else f"{sig3(ratio)}×"


def show_change(base: float, artifact: float) -> str:
    """The relative change in percent with its sign: "+0.43%"; for what changes by little."""
    if base == 0:
        return MISSING
    percent = (artifact / base - 1) * 100
    return "0%" if abs(percent) < 5e-5 else f"{'+' if percent > 0 else '−'}{sig3(abs(percent))}%"


# --- rows as lines of a table ---


@dataclass(frozen=True)
class _Spec:
    """How a metric stands in a table. `pair`: one value compares both; `always`: a line even unmeasured."""

    metric: str
    label: str
    show: Callable[[float], str] = sig3
    change: Callable[[float, float], str] = show_ratio
    pair: bool = False
    always: bool = True


_FIDELITY = (
    _Spec("perplexity", "perplexity", change=show_change),
    _Spec("kld_mean", "KLD mean, nats", pair=True),
    _Spec("kld_median", "KLD median, nats", pair=True, always=False),
    _Spec("kld_p90", "KLD p90, nats", pair=True, always=False),
    _Spec("kld_p99", "KLD p99, nats", pair=True),
    _Spec("top1_agreement", "top-1 agreement", show_percent, pair=True),
    _Spec("acc", "accuracy", show_percent, change=show_change, always=False),
    _Spec("acc_norm", "accuracy, normalised", show_percent, change=show_change, always=False),
    _Spec("acc_delta", "accuracy difference", show_percent, pair=True, always=False),
    _Spec("flips", "answers that changed", show_percent, pair=True, always=False),
    _Spec("recovery", "recovery", show_percent, pair=True, always=False),
)
_COST = (
    _Spec("size_bytes", "checkpoint", show_bytes),
    _Spec("bpw", "bits per weight"),
    _Spec("kv_bytes_per_token", "key-value cache of a token", show_bytes, always=False),
    _Spec("prefill_tok_s", "prefill tok/s"),
    _Spec("decode_tok_s", "decode tok/s"),
    _Spec("ttft_s", "time to first token", show_seconds, always=False),
    _Spec("itl_s", "time between tokens", show_seconds, always=False),
    _Spec("peak_memory_bytes", "peak memory", show_bytes),
    _Spec("load_s", "load time", show_seconds),
)
_SHORT = (
    "size_bytes", "bpw", "perplexity", "kld_mean", "kld_p99", "top1_agreement", "acc", "acc_norm", "recovery",
    "prefill_tok_s", "decode_tok_s", "peak_memory_bytes", "load_s",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a table, as text. A pair's value is the `change`; its `base` and `artifact` are empty."""

    label: str
    base: str
    artifact: str
    change: str
    spread: str
    n: str


def lines(report: Report, specs: Sequence[_Spec]) -> list[Line]:
    """One line for each metric, task and condition, base and artifact matched; held-out rows come first."""
    found: list[Line] = []
    for spec in specs:
        rows = [row for row in report["measurements"] if row["metric"] == spec.metric]
        groups: dict[str, dict[str, Row]] = {}
        for row in sorted(rows, key=lambda row: row["task"] != "heldout"):
            key = json.dumps([row["task"], row["conditions"]], sort_keys=True)
            groups.setdefault(key, {})[row["subject"]] = row
        labels = _labels(spec, [next(iter(group.values())) for group in groups.values()])
        found += [_line(spec, label, group) for label, group in zip(labels, groups.values(), strict=True)]
        if not groups and spec.always:
            found.append(_line(spec, spec.label, {}))
    return found


def _labels(spec: _Spec, rows: list[Row]) -> list[str]:
    """The metric's label, its point, and whatever else tells these lines apart."""
    tasks = {row["task"] for row in rows}
    values: dict[str, set[str]] = {}
    for row in rows:
        for key, value in row["conditions"].items():
            values.setdefault(key, set()).add(str(value))
    point = ("batch", "context", "output")
    telling = [key for key, seen in values.items() if len(seen) > 1 and key not in point]
    labels = []
    for row in rows:
        where = row["conditions"]
        parts = [spec.label]
        if all(where.get(key) is not None for key in point):
            parts.append("{batch}×{context}+{output}".format(**where))
        if len(tasks) > 1 or (spec in _FIDELITY and row["task"] != "heldout"):
            parts.append(row["task"])
        labels.append(", ".join([*parts, *(f"{key} {where[key]}" for key in telling if key in where)]))
    return labels


def _line(spec: _Spec, label: str, group: dict[str, Row]) -> Line:
    base, artifact, pair = (group.get(subject, {}).get("value") for subject in ("base", "artifact", "pair"))
    main = group.get("pair" if spec.pair else "artifact") or next(iter(group.values()), None)
    n = str(main["n"]) if main and main["n"] is not None else MISSING
    spread = MISSING
    if main and main["low"] is not None and main["high"] is not None:
        spread = f"{spec.show(main['low'])} – {spec.show(main['high'])}"
    if spec.pair:
        return Line(label, "", "", _shown(spec, pair), spread, n)
    change = MISSING if base is None or artifact is None else spec.change(base, artifact)
    return Line(label, _shown(spec, base), _shown(spec, artifact), change, spread, n)


def _shown(spec: _Spec, value: float | None) -> str:
    return MISSING if value is None else spec.show(value)


def summary_lines(report: Report) -> list[Line]:
    """The short table's lines: size, fidelity, speed, memory."""
    specs = {spec.metric: spec for spec in (*_COST, *_FIDELITY)}
    return lines(report, [specs[metric] for metric in _SHORT])


def summary_table(report: Report) -> str:
    """The short table as text, at most 80 columns wide."""
    rows = [("", "base", "artifact", "change")]
    rows += [(line.label, line.base, line.artifact, line.change) for line in summary_lines(report)]
    rest = 12
    first = WIDTH - 3 * (rest + 2)
    text = []
    for label, *cells in rows:
        head = plain(label) if len(plain(label)) <= first else plain(label)[: first - 1] + "…"
        text.append((head.ljust(first) + "".join(f"  {cell:>{rest}}" for cell in cells)).rstrip())
    text.insert(1, "─" * WIDTH)
    return "\n".join(text)


def plain(text: str) -> str:
    """One line of text without control characters (a name could move a terminal's cursor)."""
    return "".join(char if char.isprintable() else " " for char in text)


# --- the page ---


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


def conditions(report: Report) -> list[tuple[str, str]]:
    """Every condition and the values it took, and from the context what a reader should know."""
    seen: dict[str, dict[str, None]] = {}
    for row in report["measurements"]:
        parts = [*row["conditions"].items()]
        parts += [(key, row["context"][key]) for key in ("weights", "time", "load_average", "cpu_share")
                  if key in row["context"]]  # fmt: skip
        for key, value in parts:
            text = ", ".join(map(_number, value)) if isinstance(value, list) else _number(value)
            seen.setdefault(str(key), {})[text] = None
    return [(key.replace("_", " "), "; ".join(values)) for key, values in seen.items()]


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


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
        report=report, facts=_facts(report), fidelity=lines(report, _FIDELITY), cost=lines(report, _COST),
        bars=bars, top=sig3(top), chart=CHART, notes=report["artifact"].get("notes") or [],
        conditions=conditions(report), disturbed=disturbed(report), skipped=_skipped(report),
        recipe_yaml=recipe_yaml, plan_text=plan_text,
    )  # fmt: skip


def _facts(report: Report) -> list[tuple[str, str]]:
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


# --- the card ---

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARKS = re.compile(r"([\\`*_{}\[\]()#!|~$]|^[+-])")


def markdown(text: str) -> str:
    """`text` as Markdown that shows it: no markup, no HTML, no line break."""
    return html_module.escape(_MARKS.sub(r"\\\1", plain(text)), quote=False)


def fence(text: str, language: str = "") -> str:
    """A code block that `text` cannot close: its fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def card(report: Report, recipe_name: str, recipe_yaml: str, base_license: str | None) -> str:
    """The model card (README.md): front matter by the hub's conventions, how to load, the table, the recipe.

    A base that is a local folder is no hub name: the front matter leaves it out, and the text shows its last
    part only.
    """
    import jinja2
    import yaml

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,  # Markdown: every untrusted word passes the filter `md` or `fence`
    )  # fmt: skip
    environment.filters |= {"md": markdown, "fence": fence, "json": json.dumps}
    front = yaml.safe_dump(_front(report, base_license), sort_keys=False, allow_unicode=True)
    name, base = report["artifact"]["name"], report["base"]["name"]
    return environment.get_template("card.md.j2").render(
        front=front, name=name, base=base if _HUB_NAME.fullmatch(base) else Path(base).name,
        facts=_facts(report)[2:], verdict=report["verdict"], lines=summary_lines(report),
        shared=_shared_conditions(report), recipe_name=recipe_name, recipe_yaml=recipe_yaml,
        notes=report["artifact"].get("notes") or [], serve=f"vllm serve {_shell(name)}",
    )  # fmt: skip


def _front(report: Report, base_license: str | None) -> dict[str, Any]:
    front: dict[str, Any] = {}
    base = report["base"]["name"]
    if _HUB_NAME.fullmatch(base):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front["library_name"] = "transformers"
    if base_license:
        front["license"] = base_license
    tags = ["compress"]
    for key, default in (("method", None), ("scheme", None), ("format", "compressed-tensors")):
        value = report["artifact"].get(key) or default
        tags += [str(part) for part in (value if isinstance(value, list | tuple) else [value]) if part]
    return front | {"tags": list(dict.fromkeys(tags)), "pipeline_tag": "text-generation"}


def _shared_conditions(report: Report) -> list[tuple[str, str]]:
    keys = ("hardware", "runtime", "device", "threads", "dtype", "weights", "torch", "transformers")
    known = dict(conditions(report))
    return [(key, known[key]) for key in keys if key in known]


def _shell(text: str) -> str:
    return shlex.quote(plain(text))
