"""A plan's rows: for every weight its scheme, or why it has none. What cannot be is gathered as refusals and notes."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.formats.base import Format
from compress.methods.base import StepConfig
from compress.models.family import ModelFamily
from compress.models.shapes import ModelShapes
from compress.recipe import scheme_of
from compress.schemes import PRESETS, Scheme, misfit


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


@dataclass
class Draft:
    """Refusals and notes gathered while rows are resolved."""

    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve_groups(step: StepConfig, shapes: ModelShapes, about: tuple[Format, str], draft: Draft) -> Scheme | None:
    """The step's scheme with the first group size that divides every target.

    Args:
        about: the format and the model's type, for advice.
    """
    scheme = scheme_of(step.scheme)
    if scheme is None:
        return None
    targets = [(n, s) for n, s in shapes.linears if not ignored(n, step) and override_of(n, step) is None]
    if not scheme.regroups:
        if step.group_size not in (None, scheme.weights.group_size):
            draft.refusals.append(
                f"group_size {step.group_size} does not go with {scheme.text}, whose grain is the format's own; "
                "leave group_size out"
            )
        _check_fit(scheme, targets, about, draft)
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


def _check_fit(
    scheme: Scheme, targets: Sequence[tuple[str, tuple[int, int]]], about: tuple[Format, str], draft: Draft
) -> None:
    """Refuses a scheme with a grain of its own where that does not divide a weight; names those that would fit."""
    odd = [(name, why) for name, shape in targets if (why := misfit(scheme, shape))]
    if odd:
        fit = _fitting(scheme.weights.type, targets, *about)
        name, why = odd[0]
        draft.refusals.append(
            f"{len(odd)} weights cannot be {scheme.text} (such as {name}: {why}); "
            + (f"use {' or '.join(fit)}, or `overrides` for these weights" if fit else "use `overrides` for them")
        )


def _fitting(kind: str, targets: Sequence[tuple[str, tuple[int, int]]], fmt: Format, model_type: str) -> list[str]:
    """The presets of a kind that divide all weights, with a group size where they take one.

    Those that the format holds; where there is none, those that another does.
    """
    found: dict[str, Scheme] = {}
    for name, preset in PRESETS.items():
        sizes = (preset.weights.group_size, 64, 32) if preset.regroups and preset.weights.group_size else (None,)
        schemes = [preset if size is None else preset.with_group_size(size) for size in sizes]
        fits = [s for s in schemes if s.weights.type == kind and not any(misfit(s, shape) for _, shape in targets)]
        if fits:
            found[name if fits[0] == preset else f"{name} with group_size {fits[0].weights.group_size}"] = fits[0]
    return [name for name, s in found.items() if fmt.can_write(s, model_type) is None] or list(found)


def row_of(
    name: str,
    shape: tuple[int, int],
    step: StepConfig,
    resolved: Scheme | None,
    about: tuple[ModelFamily, ModelShapes, Format],
    draft: Draft,
) -> PlanRow:
    """The fate of a weight: ignored, overridden or as the step says; what cannot be is refused."""
    family, shapes, fmt = about
    tied = shapes.tied
    before = shapes.param_bytes * shape[0] * shape[1]
    scheme, reason = resolved, ""
    override = override_of(name, step)
    if ignored(name, step):
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
    if scheme and getattr(step, "actorder", None) == "group" and scheme.weights.group_size:
        if scheme.weights.type == "int" and scheme.weights.strategy == "group":
            scheme = scheme.reordered()
        else:
            why = f"`actorder: group` is for integers in groups, not for {scheme.text}; leave it out"
            draft.refusals += [] if why in draft.refusals else [why]
    if scheme and not name.startswith(family.blocks + "."):
        why = "its weights are the embedding's" if tied and name == family.head else "only blocks are quantized"
        draft.refusals.append(f"{name} cannot be quantized: {why}; add it to `ignore`")
        scheme = None
    if tied and name == family.head:
        before, reason = 0, "; ".join(filter(None, (reason, "tied to the embedding")))
    after = fmt.weight_bytes(scheme, shape) if scheme else before
    return PlanRow(name, shape, scheme, step.method if scheme else None, reason, before, after)


def ignored(name: str, step: StepConfig) -> bool:
    """Whether `ignore` names a weight."""
    return any(matches(name, pattern) for pattern in step.ignore)


def override_of(name: str, step: StepConfig) -> str | Scheme | None:
    """The scheme of the first override that names a weight."""
    return next((o.scheme for o in step.overrides if matches(name, o.match)), None)


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern names a module: its full name, or its last parts."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
