"""The report: one document of rows beside every artifact.

The idea: `report.json` is the only thing that is kept. The table, the charts, the HTML page and the model card
are pure functions of it (and of the recipe's and the plan's text), so that they can be made again at any time
and can never disagree with it. What it may hold is written in `eval/report.schema.json`, for every reader in
any language; it is checked before it is written and after it is read. A value that is no number (a broken
model's perplexity) is stored as null with the word in `context["not_finite"]`.

Left out: checks between rows (a low that is above its high, two rows of one key): those are for the code that
measures.
"""

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from compress.errors import CompressError, nearest
from compress.evaluation.metrics import Row
from compress.files import replace
from compress.paths import data_dir

Report = dict[str, Any]

SCHEMA = 1
FILE = "report.json"
_ANEW = "run the artifact's recipe again: it makes anew what is missing"
_KINDS = {
    "string": "text", "number": "a number", "integer": "a whole number", "object": "an object", "array": "a list",
    "null": "null", "boolean": "true or false",
}  # fmt: skip


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
        base: `name` (None when there is nothing to compare with), and where known `revision`, `architecture`.
        measurements: rows of `metrics.row`.
        verified: what the reload found; null before it ran.
        verdict: overall, delta, basis, tasks, and where known rule, value, low, high; null until it can be given.
    """
    return {
        "schema": SCHEMA, "artifact": artifact, "base": base, "verified": verified, "verdict": verdict,
        "measurements": list(measurements),
    }  # fmt: skip


def write(folder: Path, report: Report) -> Path:
    """Write `folder/report.json`, whole or not at all; its path."""
    path = folder / FILE
    wrong = problem(report)
    assert wrong is None, wrong
    report = {**report, "measurements": [_finite(row) for row in report["measurements"]]}
    replace(path, (json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return path


def stands(folder: Path) -> bool:
    """Whether there is a report that can be read."""
    try:
        read(folder)
    except CompressError:
        return False
    return True


def read(folder: Path) -> Report:
    """The report of the artifact in `folder`.

    Raises:
        CompressError: no report there, no JSON, or not what the schema asks for.
    """
    path = folder / FILE
    try:
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise CompressError(f"No report can be read here: {error.strerror}", where=str(path),
                            hint="give the folder of a finished artifact") from error  # fmt: skip
    except ValueError as error:
        raise CompressError(f"The report is no JSON: {error}", where=str(path),
                            hint=_ANEW) from error  # fmt: skip
    wrong = problem(report)
    if wrong:
        hint = f"{_ANEW}, or use the version that wrote it"
        raise CompressError(f"The report is not valid: {wrong}", where=str(path), hint=hint)
    return dict(report)


def problem(report: Any) -> str | None:
    """What is wrong with a report, where and in plain words; None when nothing is.

    Of several faults the version's is named first, then those nearest to the document's top: they may be the
    cause of the others.
    """
    errors = _validator().iter_errors(report)
    order = sorted(errors, key=lambda e: (_place(e) != "schema", len(e.absolute_path), _place(e)))
    return _words(order[0]) if order else None


@cache
def _validator() -> Any:
    """The schema's validator. The library is imported here: a fifth of a second that `--help` need not pay."""
    import jsonschema

    schema = json.loads((data_dir("eval") / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _place(error: Any) -> str:
    """Where in the document: "measurements[3].subject"; the whole of it is "the report"."""
    parts = [f".{part}" if str(part).isidentifier() else f"[{_short(part)}]" for part in error.absolute_path]
    return "".join(parts).removeprefix(".") or "the report"


def _words(error: Any) -> str:
    """A fault that jsonschema found, without its own language."""
    wanted, found = error.validator_value, error.instance
    known = list(error.schema.get("properties", {}))
    said = _short(found)
    match error.validator:
        case "const":
            said = f"must be {wanted}, the version that is read here, not {said}"
        case "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            said = f"must be {_either([_KINDS[kind] for kind in kinds])}, not {said}"
        case "enum":
            said = f"must be {_either(wanted)}, not {said}"
        case "required":
            said = f"lacks the key {_either([key for key in wanted if key not in found])}"
        case "additionalProperties":
            unknown = min(str(key) for key in found if key not in known)
            said = f"has the unknown key {_short(unknown)}; {nearest(unknown, known)}"
        case "minimum":
            said = f"must be at least {wanted}, not {said}"
        case "minLength":
            said = "must not be empty"
        case "pattern":
            said = f"must be a name in lower case ({wanted}), not {said}"
        case other:  # a rule that the schema gained and this text did not
            said = f"breaks the rule {other!r}: {error.message[:200]}"
    return f"{_place(error)} {said}"


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(row: Row) -> Row:
    """JSON has no inf and nan: null, and the word in the context."""
    odd = {key: str(row[key]) for key in ("value", "low", "high")
           if isinstance(row[key], float) and not math.isfinite(row[key])}  # fmt: skip
    if not odd:
        return row
    return {**row, **dict.fromkeys(odd), "context": {**row["context"], "not_finite": odd}}
