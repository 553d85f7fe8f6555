"""What a plan refuses, and what its reader should know: each check looks at the resolved rows and adds to a draft."""

import difflib
from collections.abc import Sequence
from typing import Any

from compress.activations import attentions
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.methods.base import StepConfig
from compress.models import FAMILIES
from compress.models.family import ModelFamily
from compress.models.shapes import ModelShapes
from compress.plan_rows import Draft, PlanRow, ignored, matches, override_of
from compress.recipe import Recipe, method_of
from compress.schemes import DENSE, Scheme
from compress.tables import resolve


def check_patterns(step: StepConfig, rows: Sequence[PlanRow], draft: Draft) -> None:
    """Refuses patterns that match nothing; says of an override that `ignore` hides."""
    patterns = [("overrides", o.match) for o in step.overrides]
    patterns += [("ignore", p) for p in step.ignore if p != "lm_head"]  # the default fits headless models too
    for row in rows:
        if ignored(row.name, step) and override_of(row.name, step) not in (None, DENSE):
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


def check_format(rows: Sequence[PlanRow], fmt: Format, model_type: str, draft: Draft) -> None:
    """Refuses schemes that the format cannot hold, alone or together; says what its loaders must be told."""
    schemes = list(dict.fromkeys(row.scheme for row in rows if row.scheme))
    together = fmt.can_mix(schemes)
    if together:
        draft.refusals.append(f"format {fmt.name} cannot hold these schemes together: {together}")
    formats: dict[str, Format] = {name: resolve(FORMATS, name, kind="format") for name in FORMATS}
    for scheme in schemes:
        why = fmt.can_write(scheme, model_type)
        if why:
            others = [name for name, other in formats.items() if other.can_write(scheme, model_type) is None]
            able = f"formats that can: {', '.join(others)}" if others else "no format here can"
            draft.refusals.append(f"format {fmt.name} cannot hold {scheme.text}: {why}; {able}")
        note = fmt.caveat(scheme, model_type)
        if note and note not in draft.notes:
            draft.notes.append(note)
    dense = [row.name for row in rows if row.scheme is None and row.reason != "ignored by the recipe"]
    if fmt.name == "gptq" and dense:
        draft.notes.append(
            f"{dense[0]} stays dense beside coded weights: that is said in GPTQModel's words (`dynamic`), which "
            "auto-gptq does not know, nor vLLM of layers that it fuses"
        )
    odd = [(row.name, why) for row in rows if row.scheme and (why := fmt.misfit(row.shape))]
    if odd:
        draft.refusals.append(f"format {fmt.name} cannot hold {len(odd)} weights, {odd[0][0]} first: {odd[0][1]}")


def check_transposed(rows: Sequence[PlanRow], shapes: ModelShapes, fmt: Format, draft: Draft) -> None:
    """GPT-2's linear layers are stored as [I, O]: a format of packed rows says nothing that loaders would read."""
    odd = [row.name for row in rows if row.scheme and row.name in shapes.transposed]
    if odd and not fmt.transposed:
        able = ", ".join(name for name in FORMATS if resolve(FORMATS, name, kind="format").transposed)
        draft.refusals.append(
            f"format {fmt.name} cannot hold {len(odd)} weights, {odd[0]} first: they belong to transposed layers "
            f"(Conv1D), which its loaders leave alone; formats that can: {able}"
        )


def check_smoothing(
    recipe: Recipe, rows: Sequence[PlanRow], about: tuple[ModelFamily, ModelShapes], draft: Draft
) -> None:
    """Refuses what a smoothing step cannot do; says which inputs are smoothed, and which are not and why."""
    smoothing = [step.method for step in recipe.steps if method_of(step).smooth is not None]
    if not smoothing:
        return
    family, shapes = about
    method = " and ".join(smoothing)
    if not shapes.pairs:
        draft.refusals.append(
            f"{method} must know what makes each layer's input, and this family is known by its structure only; "
            f"use rtn or gptq, or one of the families {', '.join(sorted(FAMILIES))}"
        )
    solved = {row.scheme for row in rows if row.scheme and row.method == "awq"}
    if coarse := [scheme.text for scheme in solved if scheme.weights.strategy not in ("group", "channel")]:
        draft.refusals.append(
            f"awq rounds weights in groups or by channel, not {coarse[0]}; use rtn or gptq, or another scheme"
        )
    blocks = _schemes_by_block(rows, family.blocks)
    for pair in shapes.pairs:
        ends = [name.rsplit(".", 1)[-1] for name in (pair.source, *pair.targets)]
        arrow = f"{ends[0]} → {', '.join(ends[1:])}"
        if "awq" not in smoothing and not pair.from_norm:
            draft.notes.append(f"{method} leaves {arrow} as they are: no norm makes their input")
            continue
        obstacles = [why for schemes in blocks.values() if (why := pair.obstacle(schemes))]
        scaled = len(blocks) - len(obstacles)
        if scaled:
            draft.notes.append(f"{method}: {arrow} are scaled" + (f", in {scaled} blocks" if obstacles else ""))
        draft.notes.extend(
            f"{method} leaves {arrow} as they are in {obstacles.count(why)} blocks: {why}"
            for why in dict.fromkeys(obstacles)
        )
    draft.notes.extend(f"{method} leaves the input of {name} as it is: {why}" for name, why in shapes.unpaired)


def _schemes_by_block(rows: Sequence[PlanRow], blocks: str) -> dict[str, dict[str, Scheme]]:
    """By block, the schemes of its coded weights by their names in it."""
    found: dict[str, dict[str, Scheme]] = {}
    for row in rows:
        if row.name.startswith(f"{blocks}."):
            index, name = row.name[len(blocks) + 1 :].split(".", 1)
            schemes = found.setdefault(index, {})
            if row.scheme is not None:
                schemes[name] = row.scheme
    return found


def check_fused(rows: Sequence[PlanRow], family: ModelFamily, draft: Draft) -> None:
    """Says which layers differ in scheme that runtimes fuse, and of what family nothing of that is known."""
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


def check_model(shapes: ModelShapes, calibration: dict[str, Any], draft: Draft) -> None:
    """Refuses a context longer than the model's, and a model without blocks."""
    if 0 < shapes.max_position < calibration["seq_len"]:
        draft.refusals.append(
            f"calibration.seq_len {calibration['seq_len']} is longer than the model's {shapes.max_position} positions"
        )
    if shapes.block_count < 1:
        draft.refusals.append("the model has no blocks")


def check_cache(shapes: ModelShapes, fmt: Format, draft: Draft) -> None:
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
