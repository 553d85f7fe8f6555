"""A recipe: what is asked, independent of the model. Frozen data and its loader; never touches a model.

Left out on purpose: inheritance, interpolation and dotted import paths. A recipe is read in one glance.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compress.calibration.data import Calibration
from compress.errors import CompressError, nearest
from compress.formats import FORMATS
from compress.methods import METHODS
from compress.methods.base import Method, StepConfig
from compress.paths import data_dir
from compress.schemes import DENSE, PRESETS, Scheme
from compress.tables import resolve

T = TypeVar("T", bound=BaseModel)
_UNION_BRANCH = re.compile(r"(Scheme|str|function-after\[.*)$")  # pydantic's names for them in a location


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
    kv_cache: None = None
    format: str = "compressed-tensors"
    evaluate: Evaluate = Evaluate()

    @property
    def solver(self) -> StepConfig:
        """The step that codes the weights."""
        return next(step for step in self.steps if method_of(step).kind == "block")

    def document(self) -> dict[str, Any]:
        """The recipe as plain data, every default spelled out."""
        document = self.model_dump(mode="json", exclude={"steps"})
        return {**document, "steps": [step.model_dump(mode="json") for step in self.steps]}


@dataclass(frozen=True)
class RecipeFile:
    """A recipe and the file that it came from."""

    name: str
    path: Path
    text: str
    recipe: Recipe


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(p.stem for p in data_dir("recipes").glob("*.yaml") if p.stem != "models")


def load(recipe: str) -> RecipeFile:
    """Loads a recipe by name or by path.

    Raises:
        CompressError: no such recipe; not YAML; an unknown or wrong key, with its line.
    """
    path = _find(recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CompressError("the recipe is not UTF-8 text", where=str(path)) from error
    return RecipeFile(path.stem, path, text, parse(text, str(path)))


def _find(recipe: str) -> Path:
    if recipe in recipe_names():
        return data_dir("recipes") / f"{recipe}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or "/" in recipe:
        raise CompressError(f"no recipe file {recipe!r}", hint="give a shipped recipe's name, or a YAML file")
    raise CompressError(
        f"unknown recipe {recipe!r}; {nearest(recipe, recipe_names())}",
        hint="`compress recipes` lists them; a path to a YAML file works too",
    )


def parse(text: str, where: str) -> Recipe:
    """Validates a recipe's text; `where` names the file in errors."""
    node, document = read_yaml(text, where)
    steps = document.get("steps")
    if not isinstance(steps, list) or not steps:
        raise CompressError("`steps` must be a list with at least one step", where=place(where, node, ("steps",)))
    parsed = [_step(step, where, node, i) for i, step in enumerate(steps)]
    recipe = validate(Recipe, {**document, "steps": parsed}, where, node, ())
    resolve(FORMATS, recipe.format, kind="format", where=place(where, node, ("format",)))
    check_order([method_of(step) for step in recipe.steps], place(where, node, ("steps",)))
    return recipe


def method_of(step: StepConfig) -> Method:
    """The method that a step names."""
    method = resolve(METHODS, step.method, kind="method")
    assert isinstance(method, Method)
    return method


def check_order(methods: Sequence[Method], where: str) -> None:
    """The rules on the order of steps.

    Raises:
        CompressError: two steps would code the same weights.
    """
    solvers = [m.name for m in methods if m.kind == "block"]
    if len(solvers) > 1:
        raise CompressError(
            f"steps {' and '.join(solvers)} would both code the weights; a weight is coded once",
            where=where,
            hint="keep one of them, and use `overrides` for other schemes on some layers",
        )


def scheme_of(scheme: str | Scheme, where: str | None = None) -> Scheme | None:
    """The scheme of a preset's name; None for "dense"."""
    if isinstance(scheme, Scheme):
        return scheme
    if scheme == DENSE:
        return None
    if scheme not in PRESETS:
        raise CompressError(f"unknown scheme {scheme!r}; {nearest(scheme, [*PRESETS, DENSE])}", where=where)
    return PRESETS[scheme]


def _step(step: Any, where: str, node: yaml.Node, index: int) -> StepConfig:
    path: tuple[str | int, ...] = ("steps", index)
    if not isinstance(step, dict) or not isinstance(step.get("method"), str):
        raise CompressError("a step must be a mapping with `method`", where=place(where, node, path))
    method = resolve(METHODS, step["method"], kind="method", where=place(where, node, (*path, "method")))
    config: StepConfig = validate(method.config, step, where, node, path)
    scheme_of(config.scheme, place(where, node, (*path, "scheme")))
    for i, override in enumerate(config.overrides):
        scheme_of(override.scheme, place(where, node, (*path, "overrides", i, "scheme")))
    return config


def read_yaml(text: str, where: str) -> tuple[yaml.Node, dict[str, Any]]:
    """A YAML mapping and its node tree, which knows the lines.

    Raises:
        CompressError: not YAML, a tag that would make an object, a doubled key, or not a mapping.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
        if node is not None:
            _refuse_doubled_keys(node, where)
    except RecursionError as error:
        raise CompressError("the YAML is nested too deeply, or refers to itself", where=where) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CompressError(f"not valid YAML: {error.problem}", where=f"{where}:{line}") from error
    except yaml.YAMLError as error:
        raise CompressError(f"not valid YAML: {error}", where=where) from error
    if not isinstance(document, dict) or node is None:
        raise CompressError("expected a mapping of keys to values", where=where)
    return node, document


def _refuse_doubled_keys(node: yaml.Node, where: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise CompressError(f"key {key.value!r} appears twice", where=f"{where}:{key.start_mark.line + 1}")
            seen.add(key.value)
            _refuse_doubled_keys(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubled_keys(value, where)


def place(where: str, node: yaml.Node, path: Sequence[str | int]) -> str:
    """`file:line (key)` of the deepest part of `path` that the document has."""
    line = node.start_mark.line
    for part in path:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((v for k, v in node.value if k.value == part), None)
            line = next((k.start_mark.line for k, v in node.value if k.value == part), line)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = node.value[part]
            line = found.start_mark.line
        if found is None:
            break
        node = found
    key = ".".join(str(p) for p in path)
    return f"{where}:{line + 1}" + (f" ({key})" if key else "")


def validate(
    model: type[T], document: Mapping[str, Any], where: str, node: yaml.Node, path: tuple[str | int, ...]
) -> T:
    """A document as a pydantic model; the first error becomes a `CompressError` with line and spelling."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # Of a union's branches the one that fits best; of a misspelt key, the spelling rather than its absence.
        first = max(error.errors(), key=lambda e: (len(e["loc"]), e["type"] == "extra_forbidden"))
        loc = tuple(part for part in first["loc"] if not _UNION_BRANCH.match(str(part)))
        at = place(where, node, (*path, *loc))
        key = str(loc[-1]) if loc else ""
        if first["type"] == "extra_forbidden":
            known = _fields_at(model, loc[:-1])
            raise CompressError(f"unknown key {key!r}; {nearest(key, known)}", where=at) from error
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "missing" else f" (got {first['input']!r})"
        raise CompressError(f"{key or 'recipe'}: {message}{got}", where=at) from error


def _fields_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Field names of the model that an error's location points into."""
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            nested = _model_in(model.model_fields[part].annotation)
            model = nested or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found:
            return found
    return None
