"""YAML files of people: found, read and validated, so that every mistake names its file, line, key and spelling.

Left out: anything that runs. Tags are refused, aliases may not multiply, and a file has a size and a depth.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from compress.errors import CompressError, nearest

T = TypeVar("T", bound=BaseModel)
_MOST_BYTES = 1 << 20  # of a YAML file; ours have some hundreds
_MOST_DEPTH = 50  # of brackets within brackets; a recipe needs five
_MOST_NODES = 10_000  # of a document once its aliases are written out
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_WORDS = {"tuple_type": "Input should be a list", "model_type": "Input should be a mapping"}  # for pydantic's own
_UNION_BRANCH = re.compile(r"(Scheme|str|function-after\[.*)$")  # pydantic's names for them in a location


def find_yaml(asked: str, shipped: Path, names: Sequence[str], kind: str) -> Path:
    """The file of a shipped name, or of a path.

    Raises:
        CompressError: there is no such file; for what looks like a name the nearest one is told.
    """
    if asked in names:
        return shipped / f"{asked}.yaml"
    path = Path(asked).expanduser()
    if path.is_file():
        return path
    where, hint = f"the {kind} {asked!r}", f"give a shipped {kind}'s name ({', '.join(names)}), or a YAML file"
    if path.is_dir():
        raise CompressError(f"{asked!r} is a folder, not a {kind}", where=where, hint=hint)
    if path.suffix in (".yaml", ".yml") or "/" in asked:
        raise CompressError(f"no {kind} file {asked!r}", where=where, hint=hint)
    raise CompressError(f"unknown {kind} {asked!r}; {nearest(asked, names)}", where=where, hint=hint)


def read_text(path: Path, kind: str) -> str:
    """The text of a YAML file.

    Raises:
        CompressError: it is far too large to be one, or not UTF-8.
    """
    size = path.stat().st_size
    hint = f"name a YAML file in UTF-8 that holds a {kind}"
    if size > _MOST_BYTES:
        raise CompressError(f"this file of {size:,} bytes is not a {kind}", where=str(path), hint=hint)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise CompressError(f"the {kind} is not UTF-8 text", where=f"{path}:{line}", hint=hint) from error


def read_yaml(text: str, where: str) -> tuple[yaml.Node, dict[str, Any]]:
    """A YAML mapping and its node tree, which knows the lines.

    Raises:
        CompressError: not YAML, a tag, a doubled key, aliases that multiply, or not a mapping.
    """
    hint = "mend the YAML there"
    try:
        _refuse_tags(text, where)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None and _written_out(node, {}, where) > _MOST_NODES:
            raise CompressError(
                f"its aliases (`*name`) multiply to more than {_MOST_NODES:,} values",
                where=where,
                hint="write the values out",
            )
        document = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise CompressError(f"not valid YAML: {error.problem}", where=f"{where}:{line}", hint=hint) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date or a number, and is none
        raise CompressError(f"not valid YAML: {error}", where=where, hint=hint) from error
    if not isinstance(document, dict) or node is None:
        found = "nothing" if document is None else f"a {type(document).__name__}"
        hint = "begin with `version: 1` and `summary: …`, a key a line"
        raise CompressError(f"expected a mapping of keys to values, found {found}", where=where, hint=hint)
    return node, document


def _refuse_tags(text: str, where: str) -> None:
    """No value needs a tag, and Python's make objects or call functions; nor are deep nests read any further."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise CompressError("the YAML is nested too deeply", where=where, hint="mend the YAML there")
        tag = getattr(event, "tag", None)
        mark = event.start_mark
        if tag is not None and mark is not None:
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            raise CompressError(
                f"the tag {tag!r} is refused, and nothing of it was run: this is data, not a program",
                where=f"{where}:{mark.line + 1}",
                hint="write a plain value without the tag",
            )


def _written_out(node: yaml.Node, known: dict[int, int], where: str) -> int:
    """How many values a document has once its aliases are written out; each node is looked at once.

    Raises:
        CompressError: a node holds itself, or a mapping has a key twice.
    """
    if id(node) in known:
        if not known[id(node)]:
            line = f"{where}:{node.start_mark.line + 1}"
            raise CompressError("this value holds itself", where=line, hint="write the value out without an alias")
        return known[id(node)]
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_doubled_keys(node, where)
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_written_out(child, known, where) for child in children)
    return known[id(node)]


def _refuse_doubled_keys(node: yaml.MappingNode, where: str) -> None:
    seen: dict[str, str] = {}
    for key, _ in node.value:
        line = place(where, key, ()).rpartition(":")[2]
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise CompressError(
                f"key {key.value!r} appears twice, first in line {seen[key.value]}",
                where=f"{where}:{line}",
                hint="keep one of them",
            )
        seen[str(key.value)] = line


def place(where: str, node: yaml.Node, path: Sequence[str | int]) -> str:
    """`file:line (key)` of the deepest part of `path` that the document has."""
    line = node.start_mark.line
    for part in path:
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((v for k, v in node.value if k.value == str(part)), None)
            line = next((k.start_mark.line for k, v in node.value if k.value == str(part)), line)
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
            what, hint = f"unknown key {key!r}; {nearest(key, known)}", "correct the spelling, or leave the key out"
            raise CompressError(what, where=at, hint=hint) from error
        message = _WORDS.get(first["type"]) or first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "missing" else f" (got {_short(first['input'])})"
        hint = _remedy(key, first, _bounds_at(model, loc))
        raise CompressError(f"{key or 'recipe'}: {message}{got}", where=at, hint=hint) from error


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}…"


def _remedy(key: str, found: Mapping[str, Any], bounds: str) -> str:
    """What to write instead, as far as pydantic's error tells."""
    context = found.get("ctx", {})
    if found["type"] == "missing":
        return f"add the key `{key}`"
    if found["type"].startswith("int_") or context.keys() & _BOUNDS.keys():
        kind = "whole number" if found["type"].startswith("int_") else "number"
        return f"give `{key}` a {kind}" + (f" of {bounds}" if bounds else "")
    if "expected" in context:
        return f"write `{key}: {context['expected']}`"
    if found["type"] == "tuple_type":
        return f"write a list, `{key}: [one, another]`"
    return "correct the value; README.md (Recipes) shows every key"


def _bounds_at(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    """The limits of the field that an error's location names."""
    names = [part for part in loc if isinstance(part, str)]
    for part in names[:-1]:
        model = (_model_in(model.model_fields[part].annotation) if part in model.model_fields else None) or model
    field = model.model_fields.get(names[-1]) if names else None
    limits: list[Any] = field.metadata if field else []
    found = ((words, getattr(limit, bound, None)) for limit in limits for bound, words in _BOUNDS.items())
    return " and ".join(f"{words} {value:g}" for words, value in found if value is not None)


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
