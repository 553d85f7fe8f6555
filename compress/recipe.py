"""A recipe: what is asked, independent of the model. Frozen data and its loader; never touches a model.

Left out on purpose: inheritance, interpolation and dotted import paths. A recipe is read in one glance.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from compress.calibration.data import Calibration
from compress.errors import CompressError, nearest
from compress.formats import FORMATS
from compress.methods import METHODS
from compress.methods.base import Method, StepConfig
from compress.paths import data_dir
from compress.schemes import DENSE, PRESETS, Scheme, weight_bytes
from compress.tables import resolve
from compress.yaml_files import find_yaml, place, read_text, read_yaml, validate

_STEP = "write `steps: [{method: gptq, scheme: W4A16}]`, or look at a shipped recipe in recipes/"


class Evaluate(BaseModel):
    """What is measured once the artifact is verified.

    Attributes:
        suite: a name in eval/suites, or a path to a YAML file.
        delta: the difference that still counts as "as good", in absolute accuracy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str = "embedded"
    delta: float = Field(default=0.01, gt=0, lt=1)


class Recipe(BaseModel):
    """A validated recipe. `steps` hold each method's own frozen config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    summary: str
    steps: tuple[StepConfig, ...]
    calibration: Calibration = Calibration()
    kv_cache: Literal["FP8"] | None = None
    format: str = "compressed-tensors"
    evaluate: Evaluate = Evaluate()

    @property
    def solver(self) -> StepConfig:
        """The step that codes the weights."""
        return next(step for step in self.steps if codes(step))

    def document(self) -> dict[str, Any]:
        """The recipe as plain data, every default spelled out."""
        document = self.model_dump(mode="json", exclude={"steps"})
        return {**document, "steps": [step.model_dump(mode="json") for step in self.steps]}


def price(recipe: Recipe) -> dict[str, Any]:
    """What a recipe costs whatever the model: bits of a coded weight (4096 × 4096), tokens, the suite."""
    step = recipe.solver
    scheme = scheme_of(step.scheme)
    if scheme and step.group_size and scheme.weights.group_size and scheme.regroups:
        scheme = scheme.with_group_size(step.group_size)
    return {
        "bits_per_weight": 8 * weight_bytes(scheme, (4096, 4096)) / 4096**2,
        "calibration_tokens": recipe.calibration.samples * recipe.calibration.seq_len if needs_data(recipe) else 0,
        "suite": recipe.evaluate.suite,
    }


def needs_data(recipe: Recipe) -> bool:
    """Whether calibration tokens are needed: by a method, or for static scales of a scheme or the cache."""
    schemes = [scheme_of(s) for step in recipe.steps for s in (step.scheme, *(o.scheme for o in step.overrides))]
    static = recipe.kv_cache is not None or any(s and s.static_inputs for s in schemes)
    return static or any(method_of(step).statistics for step in recipe.steps)


@dataclass(frozen=True)
class RecipeFile:
    """A recipe and the file that it came from; `changes` are values that the user put in place of the file's."""

    name: str
    path: Path
    text: str
    recipe: Recipe
    changes: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def located(self) -> Iterator[None]:
        """A `CompressError` from within that is about one of the recipe's keys names the file and line too."""
        try:
            yield
        except CompressError as error:
            suite = error.where == f"the suite {self.recipe.evaluate.suite!r}"
            path = ["evaluate", "suite"] if suite else (error.where or "").split(".")
            if path[0] not in Recipe.model_fields:
                raise
            if ".".join(path) in self.changes:
                raise CompressError(error.what, where=option(".".join(path)), hint=error.hint) from error
            node, _ = read_yaml(read_text(self.path, "recipe"), str(self.path))  # not `text`, which may be changed
            raise CompressError(error.what, where=place(str(self.path), node, path), hint=error.hint) from error


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(p.stem for p in data_dir("recipes").glob("*.yaml") if p.stem != "models")


def load(recipe: str) -> RecipeFile:
    """Loads a recipe by name or by path.

    Raises:
        CompressError: no such recipe; not YAML; an unknown or wrong key, with its line.
    """
    path = find_yaml(recipe, data_dir("recipes"), recipe_names(), "recipe")
    text = read_text(path, "recipe")
    return RecipeFile(path.stem, path, text, parse(text, str(path)))


def changed(file: RecipeFile, changes: Mapping[str, Any]) -> RecipeFile:
    """The recipe with other values, by dotted keys; its text is then the whole of it, every default spelled out.

    Raises:
        CompressError: a value that the recipe could not have; the error names the option.
    """
    recipe, text = file.recipe, file.text
    for key, value in changes.items():
        document = recipe.document()
        *path, last = key.split(".")
        part = document
        for name in path:
            part = part[name]
        part[last] = value
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        try:
            recipe = parse(text, str(file.path))
        except CompressError as error:
            raise CompressError(error.what, where=option(key), hint=error.hint) from error
    if changes:
        text = f"# {file.path.name}, with {', '.join(map(option, changes))}\n{text}"
    return RecipeFile(file.name, file.path, text, recipe, dict(changes))


def option(key: str) -> str:
    """The command line's word for a dotted key: "calibration.seq_len" is --seq-len."""
    return "--" + key.rsplit(".", 1)[-1].replace("_", "-")


def parse(text: str, where: str) -> Recipe:
    """Validates a recipe's text; `where` names the file in errors."""
    node, document = read_yaml(text, where)
    steps = document.get("steps")
    if not isinstance(steps, list) or not steps:
        raise CompressError(
            "`steps` must be a list with at least one step",
            where=place(where, node, ("steps",)),
            hint=_STEP,
        )
    parsed = [_step(step, where, node, i) for i, step in enumerate(steps)]
    recipe = validate(Recipe, {**document, "steps": parsed}, where, node, ())
    resolve(FORMATS, recipe.format, kind="format", where=place(where, node, ("format",)))
    check_order(recipe.steps, place(where, node, ("steps",)))
    return recipe


def method_of(step: StepConfig) -> Method:
    """The method that a step names."""
    method = resolve(METHODS, step.method, kind="method")
    assert isinstance(method, Method)
    return method


def check_order(steps: Sequence[StepConfig], where: str) -> None:
    """The rules on the order of steps: any that only smooth, then one that codes the weights.

    Raises:
        CompressError: no step codes the weights, two would, or one comes too late.
    """
    coding = [i for i, step in enumerate(steps) if codes(step)]
    names = [step.method for step in steps]
    if len(coding) > 1:
        raise CompressError(
            f"steps {' and '.join(names[i] for i in coding)} would both code the weights; a weight is coded once",
            where=where,
            hint="keep one of them, and use `overrides` for other schemes on some layers",
        )
    if not coding:
        raise CompressError(
            f"no step codes the weights: {' and '.join(names)} only smooth them", where=where,
            hint="give a scheme, or add a step that has one, such as {method: gptq, scheme: W4A16}",
        )  # fmt: skip
    if coding[0] != len(steps) - 1:
        raise CompressError(
            f"{names[-1]} comes after {names[coding[0]]}, which codes the weights", where=where,
            hint="put what smooths first",
        )  # fmt: skip


def codes(step: StepConfig) -> bool:
    """Whether a step codes weights, rather than only preparing them."""
    return method_of(step).kind == "block" and step.scheme is not None


def scheme_of(scheme: str | Scheme | None, where: str | None = None) -> Scheme | None:
    """The scheme of a preset's name; None for "dense", and where there is none."""
    if isinstance(scheme, Scheme):
        return scheme
    if scheme is None or scheme == DENSE:
        return None
    if scheme not in PRESETS:
        raise CompressError(
            f"unknown scheme {scheme!r}; {nearest(scheme, [*PRESETS, DENSE])}",
            where=where,
            hint="use one of these, or spell a scheme out: `scheme: {weights: {num_bits: 4, …}}`",
        )
    return PRESETS[scheme]


def _step(step: Any, where: str, node: yaml.Node, index: int) -> StepConfig:
    path: tuple[str | int, ...] = ("steps", index)
    if not isinstance(step, dict) or not isinstance(step.get("method"), str):
        raise CompressError("a step must be a mapping with `method`", where=place(where, node, path), hint=_STEP)
    method = resolve(METHODS, step["method"], kind="method", where=place(where, node, (*path, "method")))
    config: StepConfig = validate(method.config, step, where, node, path)
    scheme_of(config.scheme, place(where, node, (*path, "scheme")))
    for i, override in enumerate(config.overrides):
        scheme_of(override.scheme, place(where, node, (*path, "overrides", i, "scheme")))
    return config
