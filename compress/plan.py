"""The plan: a recipe resolved against a model's shapes, one row per weight. Pure; its text is the dry run.

Everything that would fail hours later is refused here: a group size that does not divide, a pattern that
matches nothing, a scheme that the format cannot hold, a tied head. Refusals are collected, so that a person
sees all of them at once.

Left out: estimates of time; they would be guesses before this machine has been measured.
"""

import difflib
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.activations import attentions
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.methods.base import StepConfig
from compress.models import FAMILIES
from compress.models.family import ModelFamily
from compress.models.shapes import ModelShapes
from compress.recipe import Recipe, method_of, needs_data, scheme_of
from compress.schemes import DENSE, PRESETS, Scheme, misfit, weight_bytes
from compress.tables import resolve

SUSPENDED_LIMIT = 2 << 30  # bytes of activations that a suspended forward pass may hold
_HOLDS_TRANSPOSED = ("dense", "gptq")  # formats whose loaders read the weights of transposed layers
_PROGRAM_BYTES = 380 << 20  # the interpreter with torch and transformers loaded, as measured


@dataclass(frozen=True)
class PlanRow:
    """The fate of one weight: coded in a scheme by a method, or left alone for a reason."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme | None
    method: str | None
    reason: str
    bytes_before: int
    bytes_after: int


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


@dataclass
class _Draft:
    """Refusals and notes gathered while rows are resolved."""

    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    draft = _Draft()
    step = recipe.solver
    resolved = _resolve_groups(step, shapes, draft)
    rows = tuple(_row(name, shape, step, resolved, (family, shapes, fmt), draft) for name, shape in shapes.linears)
    _check_patterns(step, rows, draft)
    _check_format(rows, fmt, draft)
    _check_transposed(rows, shapes, fmt, draft)
    _check_fused(rows, family, draft)
    _check_smoothing(recipe, resolved, shapes, draft)
    if recipe.kv_cache:
        _check_cache(shapes, fmt, draft)
    coded = [row for row in rows if row.scheme is not None]
    _check_model(shapes, calibration, draft)
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
        loaders=fmt.loaders,
        suite=suite or recipe.evaluate.suite,
        memory_bytes=_memory(shapes, calibration, statistics, sequential),
        disk_bytes=2 * (before - saved) + _chain_bytes(shapes, calibration, data),
        kv_cache=recipe.kv_cache,
        notes=tuple(draft.notes),
        refusals=tuple(draft.refusals),
    )


def _resolve_groups(step: StepConfig, shapes: ModelShapes, draft: _Draft) -> Scheme | None:
    """The step's scheme with the first group size that divides every target."""
    scheme = scheme_of(step.scheme)
    if scheme is None:
        return None
    targets = [(n, s) for n, s in shapes.linears if not _ignored(n, step) and _override(n, step) is None]
    if not scheme.regroups:
        if step.group_size not in (None, scheme.weights.group_size):
            draft.refusals.append(
                f"group_size {step.group_size} does not go with {scheme.text}, whose grain is the format's own; "
                "leave group_size out"
            )
        _check_fit(scheme, targets, draft)
        return scheme
    asked = step.group_size or scheme.weights.group_size
    if asked is None:
        return scheme
    for size in (asked, *step.group_fallback):
        if all(in_features % size == 0 for _, (_, in_features) in targets):
            if size != asked:
                widths = sorted({i for _, (_, i) in targets if i % asked})
                draft.notes.append(
                    f"group_size {asked} does not divide the input width {widths[0]}; the whole model uses "
                    f"group_size {size} (group_fallback)"
                )
            return scheme.with_group_size(size)
    odd = [(n, i) for n, (_, i) in targets if i % asked]
    choices = [g for g in (128, 64, 32, 16) if all(i % g == 0 for _, (_, i) in targets)]
    draft.refusals.append(
        f"group_size {asked} does not divide the input width of {len(odd)} weights "
        f"(such as {odd[0][0]}, {odd[0][1]} wide); "
        + (f"use group_size or group_fallback {choices}" if choices else "use a scheme per channel")
    )
    return scheme.with_group_size(asked)


def _check_fit(scheme: Scheme, targets: Sequence[tuple[str, tuple[int, int]]], draft: _Draft) -> None:
    """Refuses a scheme with a grain of its own where that does not divide a weight."""
    odd = [(name, why) for name, shape in targets if (why := misfit(scheme, shape))]
    if odd:
        kind = scheme.weights.type
        fit = [n for n, s in PRESETS.items() if s.weights.type == kind and not any(misfit(s, t) for _, t in targets)]
        name, why = odd[0]
        draft.refusals.append(
            f"{len(odd)} weights cannot be {scheme.text} (such as {name}: {why}); "
            f"use {' or '.join(fit)}, or `overrides` for these weights"
        )


def _row(
    name: str,
    shape: tuple[int, int],
    step: StepConfig,
    resolved: Scheme | None,
    about: tuple[ModelFamily, ModelShapes, Format],
    draft: _Draft,
) -> PlanRow:
    family, shapes, fmt = about
    tied = shapes.tied
    before = shapes.param_bytes * shape[0] * shape[1]
    scheme, reason = resolved, ""
    override = _override(name, step)
    if _ignored(name, step):
        scheme, reason = None, "ignored by the recipe"
    elif override is not None:
        scheme = scheme_of(override)
        reason = "override" if scheme else "left dense by an override"
        size = scheme.weights.group_size if scheme and scheme.regroups else None
        fits = next((g for g in (size, *step.group_fallback) if g and shape[1] % g == 0), None)
        why = misfit(scheme, shape) if scheme else None
        if scheme and size and fits:
            scheme = scheme.with_group_size(fits)
        elif size:
            draft.refusals.append(f"{name} is {shape[1]} wide, which its override's group size {size} does not divide")
        elif why:
            draft.refusals.append(f"{name} cannot have its override's scheme: {why}")
    if scheme and not name.startswith(family.blocks + "."):
        why = "its weights are the embedding's" if tied and name == family.head else "only blocks are quantized"
        draft.refusals.append(f"{name} cannot be quantized: {why}; add it to `ignore`")
        scheme = None
    if tied and name == family.head:
        before, reason = 0, reason + "; tied to the embedding"
    coded = weight_bytes(scheme, shape) if fmt.packs else weight_bytes(None, shape)
    after = coded if scheme else before
    return PlanRow(name, shape, scheme, step.method if scheme else None, reason, before, after)


def _ignored(name: str, step: StepConfig) -> bool:
    return any(matches(name, pattern) for pattern in step.ignore)


def _override(name: str, step: StepConfig) -> str | Scheme | None:
    return next((o.scheme for o in step.overrides if matches(name, o.match)), None)


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern names a module: its full name, or its last parts."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _check_patterns(step: StepConfig, rows: Sequence[PlanRow], draft: _Draft) -> None:
    patterns = [("overrides", o.match) for o in step.overrides]
    patterns += [("ignore", p) for p in step.ignore if p != "lm_head"]  # the default fits headless models too
    for row in rows:
        if _ignored(row.name, step) and _override(row.name, step) not in (None, DENSE):
            draft.notes.append(f"{row.name} is ignored, so its override does nothing")
    for key, pattern in patterns:
        if not any(matches(row.name, pattern) for row in rows):
            draft.refusals.append(f"{key}: {pattern!r} matches no weight; {_nearest_name(pattern, rows)}")


def _nearest_name(pattern: str, rows: Sequence[PlanRow]) -> str:
    """The name, or the end of one, that a pattern is likely to mean."""
    plain = pattern.removeprefix("*.")
    parts = [row.name.split(".") for row in rows]
    ends = dict.fromkeys(".".join(name[i:]) for name in parts for i in range(len(name)))
    close = difflib.get_close_matches(plain, ends, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"weights are named like {rows[0].name}"


def _check_format(rows: Sequence[PlanRow], fmt: Format, draft: _Draft) -> None:
    schemes = list(dict.fromkeys(row.scheme for row in rows if row.scheme))
    together = fmt.can_mix(schemes)
    if together:
        draft.refusals.append(f"format {fmt.name} cannot hold these schemes together: {together}")
    for scheme in schemes:
        why = fmt.can_write(scheme)
        if why:
            others = [name for name in FORMATS if resolve(FORMATS, name, kind="format").can_write(scheme) is None]
            able = f"formats that can: {', '.join(others)}" if others else "no format here can"
            draft.refusals.append(f"format {fmt.name} cannot hold {scheme.text}: {why}; {able}")
        note = fmt.caveat(scheme)
        if note:
            draft.notes.append(note)


def _check_transposed(rows: Sequence[PlanRow], shapes: ModelShapes, fmt: Format, draft: _Draft) -> None:
    """GPT-2's linear layers are stored as [I, O]: a format of packed rows says nothing that loaders would read."""
    odd = [row.name for row in rows if row.scheme and row.name in shapes.transposed]
    if odd and fmt.name not in _HOLDS_TRANSPOSED:
        able = ", ".join(name for name in FORMATS if name in _HOLDS_TRANSPOSED)
        draft.refusals.append(
            f"format {fmt.name} cannot hold {len(odd)} weights, {odd[0]} first: they belong to transposed layers "
            f"(Conv1D), which its loaders leave alone; formats that can: {able}"
        )


def _check_smoothing(recipe: Recipe, scheme: Scheme | None, shapes: ModelShapes, draft: _Draft) -> None:
    """Refuses what a smoothing step cannot do; says which inputs are smoothed, and which are not and why."""
    smoothing = [step.method for step in recipe.steps if method_of(step).smooth is not None]
    if not smoothing:
        return
    method = " and ".join(smoothing)
    if not shapes.paired:
        draft.refusals.append(
            f"{method} must know what makes each layer's input, and this family is known by its structure only; "
            f"use rtn or gptq, or one of the families {', '.join(sorted(FAMILIES))}"
        )
    if "awq" in smoothing and scheme is not None and scheme.weights.strategy not in ("group", "channel"):
        draft.refusals.append(
            f"awq rounds weights in groups or by channel, not {scheme.text}; use rtn or gptq, or another scheme"
        )
    norms = [(targets, source) for targets, source in shapes.paired if "norm" in source or "ln_" in source]
    done = shapes.paired if "awq" in smoothing else norms
    skipped = [
        *shapes.unpaired,
        *((", ".join(t), "no norm makes their input") for t, s in shapes.paired if (t, s) not in done),
    ]
    short = {name: name.rsplit(".", 1)[-1] for targets, source in shapes.paired for name in (*targets, source)}
    for targets, source in done:
        draft.notes.append(f"{method}: {short[source]} → {', '.join(short[t] for t in targets)} are scaled")
    draft.notes.extend(f"{method} leaves the input of {name} as it is: {why}" for name, why in skipped)


def _check_fused(rows: Sequence[PlanRow], family: ModelFamily, draft: _Draft) -> None:
    if family.inferred:
        draft.notes.append(
            f"the family {family.model_type!r} is known by its structure alone: embedding, blocks, norm and head were "
            "inferred; nothing is known of what its runtimes fuse"
        )
    schemes = {row.name: row.scheme for row in rows}
    for parts in family.fused:
        for name, scheme in schemes.items():
            if name.endswith("." + parts[0]):
                stem = name[: -len(parts[0])]
                if any(schemes.get(stem + part, scheme) != scheme for part in parts[1:]):
                    draft.notes.append(f"{stem}{{{', '.join(parts)}}} differ in scheme: vLLM fuses them and refuses")
                    break


def _check_model(shapes: ModelShapes, calibration: dict[str, Any], draft: _Draft) -> None:
    if 0 < shapes.max_position < calibration["seq_len"]:
        draft.refusals.append(
            f"calibration.seq_len {calibration['seq_len']} is longer than the model's {shapes.max_position} positions"
        )
    if shapes.block_count < 1:
        draft.refusals.append("the model has no blocks")


def _check_cache(shapes: ModelShapes, fmt: Format, draft: _Draft) -> None:
    """Refuses a quantized cache where it cannot be said, or where no keys and values of each block are found."""
    if not fmt.holds_cache:
        draft.refusals.append(f"kv_cache: format {fmt.name} has no words for a quantized cache; leave kv_cache out")
    draft.notes.append(
        "kv_cache: transformers 5.24 with compressed-tensors 0.20.1 does not see it and keeps keys and values as they "
        "are; what is measured here quantizes them"
    )
    found = len(attentions(name for name, _ in shapes.linears))
    if found != shapes.block_count:
        draft.refusals.append(
            f"kv_cache: {found} of {shapes.block_count} blocks have an attention layer that projects keys (k_proj or "
            "qkv_proj); leave kv_cache out"
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
