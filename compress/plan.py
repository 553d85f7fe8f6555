"""The plan: a recipe resolved against a model's shapes, one row per weight. Pure; its text is the dry run.

Everything that would fail hours later is refused here: a group size that does not divide, a pattern that
matches nothing, a scheme that the format cannot hold, a tied head. Refusals are collected, so that a person
sees all of them at once.

Left out: estimates of time; they would be guesses before this machine has been measured.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.formats.base import Format
from compress.methods.base import StepConfig
from compress.models.family import ModelFamily
from compress.models.shapes import ModelShapes
from compress.plan_checks import (
    check_cache,
    check_format,
    check_fused,
    check_model,
    check_patterns,
    check_smoothing,
    check_transposed,
)
from compress.plan_rows import Draft, PlanRow, resolve_groups, row_of
from compress.recipe import Recipe, method_of, needs_data
from compress.schemes import Scheme

SUSPENDED_LIMIT = 2 << 30  # bytes of activations that a suspended forward pass may hold
_PROGRAM_BYTES = 380 << 20  # the interpreter with torch and transformers loaded, as measured


@dataclass(frozen=True)
class Plan:
    """What will be done. `refusals` empty means that it can be."""

    model: str
    recipe: str
    format: str
    rows: tuple[PlanRow, ...]
    bytes_before: int
    bytes_after: int
    bpw: float
    kv_bytes_per_token: int
    statistics: str
    sequential: bool
    calibration: dict[str, Any]
    suite: str
    loaders: tuple[str, ...]
    memory_bytes: int
    disk_bytes: int
    kv_cache: str | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def schemes(self) -> dict[str, Scheme]:
        """The weights to be coded."""
        return {row.name: row.scheme for row in self.rows if row.scheme is not None}

    def document(self) -> dict[str, Any]:
        """The plan as plain data."""
        document = asdict(self)
        for plain, row in zip(document["rows"], self.rows, strict=True):
            plain["scheme"] = None if row.scheme is None else row.scheme.model_dump(mode="json")
        return json.loads(json.dumps(document))  # type: ignore[no-any-return]


def read_plan(folder: Path) -> Plan | None:
    """The plan that stands in an artifact as plan.json; None when there is none that this version reads."""
    try:
        document = json.loads((folder / "plan.json").read_bytes())
        rows = [{**row, "shape": tuple(row["shape"]), "scheme": _scheme(row["scheme"])} for row in document["rows"]]
        lists = {key: tuple(document[key]) for key in ("loaders", "notes", "refusals")}
        return Plan(**{**document, **lists, "rows": tuple(PlanRow(**row) for row in rows)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _scheme(document: dict[str, Any] | None) -> Scheme | None:
    return None if document is None else Scheme.model_validate(document)


def make_plan(
    recipe: Recipe,
    shapes: ModelShapes,
    family: ModelFamily,
    fmt: Format,
    *,
    names: tuple[str, str],
    calibration: dict[str, Any],
    suite: str | None = None,
) -> Plan:
    """Resolves a recipe against a model.

    Args:
        names: the model's and the recipe's, for the reader.
        suite: what is measured, where it is not the recipe's.
        calibration: what the data resolve to: `dataset`, `asked`, `reason`, `tokens`, `heldout`, `seq_len`.
    """
    draft = Draft()
    step = recipe.solver
    resolved = resolve_groups(step, shapes, (fmt, family.model_type), draft)
    rows = tuple(row_of(name, shape, step, resolved, (family, shapes, fmt), draft) for name, shape in shapes.linears)
    check_patterns(step, rows, draft)
    check_format(rows, fmt, family.model_type, draft)
    check_transposed(rows, shapes, fmt, draft)
    check_fused(rows, family, draft)
    check_smoothing(recipe, rows, (family, shapes), draft)
    if recipe.kv_cache:
        check_cache(shapes, fmt, draft)
    coded = [row for row in rows if row.scheme is not None]
    check_model(shapes, calibration, draft)
    if not coded:
        draft.refusals.append("no weight would be quantized; look at `ignore` and `overrides`")
    before = shapes.param_bytes * shapes.other_params + sum(row.bytes_before for row in rows)
    saved = sum(row.bytes_before - row.bytes_after for row in coded)
    bits = 8 * sum(row.bytes_after for row in coded)
    data = needs_data(recipe)
    gathered = {method_of(s).statistics for s in recipe.steps} | {"gram" for s in recipe.steps if _wants_gram(s)}
    statistics = next((kind for kind in ("gram", "absmax") if kind in gathered), "absmax" if data else "none")
    sequential = not data or suspended_bytes(shapes, calibration) <= SUSPENDED_LIMIT
    return Plan(
        model=names[0],
        recipe=names[1],
        format=fmt.name,
        rows=rows,
        bytes_before=before,
        bytes_after=before - saved,
        bpw=bits / max(1, sum(row.shape[0] * row.shape[1] for row in coded)),
        kv_bytes_per_token=shapes.kv_bytes_per_token,
        statistics=statistics,
        sequential=sequential,
        calibration=calibration,
        loaders=fmt.read_by({row.scheme for row in coded if row.scheme}),
        suite=suite or recipe.evaluate.suite,
        memory_bytes=_memory(shapes, calibration, statistics, sequential),
        disk_bytes=2 * (before - saved) + _chain_bytes(shapes, calibration, data),
        kv_cache=recipe.kv_cache,
        notes=tuple(draft.notes),
        refusals=tuple(draft.refusals),
    )


def suspended_bytes(shapes: ModelShapes, calibration: dict[str, Any]) -> int:
    """Bytes that stay alive while every batch waits in front of the attention's output or the widest layer.

    float32: the residual and the normed input; before the output projection also queries, keys and values. What is
    waited with itself waits in bfloat16.
    """
    widest = max(i for _, (_, i) in shapes.linears)
    queries = max((i for name, (_, i) in shapes.linears if name.endswith("o_proj")), default=shapes.hidden_size)
    keys_and_values = shapes.kv_bytes_per_token // (2 * max(1, shapes.block_count))
    attention = 4 * (queries + keys_and_values) + 2 * queries
    return int(calibration["tokens"] * (4 * 2 * shapes.hidden_size + max(attention, 2 * widest)))


def _wants_gram(step: StepConfig) -> bool:
    """Whether a smoothing step searches, rather than only scaling by the largest inputs."""
    return getattr(step, "alpha", None) == "auto"


def _memory(shapes: ModelShapes, calibration: dict[str, Any], statistics: str, sequential: bool) -> int:
    """Peak resident bytes of the walk: the program, a block (stored and float32), its statistics."""
    inside = [shape for name, shape in shapes.linears if name != shapes.head]
    block_params = sum(o * i for o, i in inside) // max(1, shapes.block_count)
    solve = max(((5 * 4 * i * i if statistics == "gram" else 0) + 24 * o * i for o, i in inside), default=0)
    held = suspended_bytes(shapes, calibration) if statistics != "none" and sequential else 0
    embedding = 2 * shapes.vocab_size * shapes.hidden_size
    head = 4 * shapes.vocab_size * (shapes.hidden_size + 4 * 64)
    return int(_PROGRAM_BYTES + max(8 * block_params + solve + held, embedding, head))


def _chain_bytes(shapes: ModelShapes, calibration: dict[str, Any], statistics: bool) -> int:
    heldout = 2 * 2 * 4 * calibration["heldout"] * shapes.hidden_size
    return int(heldout + (2 * 2 * calibration["tokens"] * shapes.hidden_size if statistics else 0))
