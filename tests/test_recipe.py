"""Recipes: the shipped ones load and plan everywhere; a wrong one is answered with file, line, key and choices."""

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import FAMILY_NAMES, family_settings
from pydantic import ValidationError

from compress.errors import CompressError
from compress.formats import FORMATS
from compress.formats.gguf_facts import ARCHITECTURES
from compress.methods import METHODS
from compress.models.load import family, skeleton
from compress.models.shapes import ModelShapes, shapes_of
from compress.plan import make_plan
from compress.recipe import load, parse, recipe_names, scheme_of
from compress.schemes import PRESETS, Scheme
from compress.tables import resolve

HEAD = "version: 1\nsummary: a test\nsteps:\n  - method: rtn\n"
RTN = HEAD + "    scheme: W4A16\n"
GPTQ = RTN.replace("rtn", "gptq")
OVERRIDE = RTN + "    overrides:\n      - match: '*.down_proj'\n        scheme: "
DATA = {"dataset": "embedded", "asked": "auto", "reason": "", "tokens": 512, "heldout": 512, "seq_len": 512}


def test_blocks_are_refused_where_128_does_not_divide() -> None:
    file = load("fp8-block")
    fmt = resolve(FORMATS, "fp8", kind="format")
    plan = make_plan(
        file.recipe, shapes("llama"), family("llama", "here"), fmt, names=("tiny", "fp8-block"), calibration=DATA
    )
    said = "\n".join(plan.refusals)
    assert "block_structure [128, 128] does not divide" in said
    assert "FP8_DYNAMIC" in said
    assert "no multiple of 128" in said


def refusal(text: str) -> CompressError:
    with pytest.raises(CompressError) as caught:
        parse(text, "my.yaml")
    return caught.value


# ---- the shipped recipes


@cache
def shapes(model_type: str) -> ModelShapes:
    config = {"model_type": model_type, **family_settings(model_type, layers=2)}
    return shapes_of(skeleton(config, "here"), family(model_type, "here"), config)


def eightfold(model: ModelShapes) -> ModelShapes:
    """Widths that 128 divides."""
    return dataclasses.replace(model, linears=tuple((name, (8 * o, 8 * i)) for name, (o, i) in model.linears))


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_plans_on_every_family(name: str, model_type: str) -> None:
    file = load(name)
    fmt = resolve(FORMATS, "dense" if model_type == "gpt2" else file.recipe.format, kind="format")
    model = eightfold(shapes(model_type)) if name == "fp8-block" else shapes(model_type)
    plan = make_plan(
        file.recipe, model, family(model_type, "here"), fmt,
        names=("tiny", name), calibration=DATA,
    )  # fmt: skip
    if fmt.name == "gguf" and model_type not in ARCHITECTURES:
        assert "it is written for the families" in plan.refusals[0]
        return
    if any(row.scheme and row.scheme.input_activations for row in plan.rows):
        reasons = {  # gpt2 is only held by the format dense, and a quantized falcon only loads expanded
            "gpt2": "it has no words for quantized activations", "falcon": "activations are not quantized",
        }  # fmt: skip
        if model_type in reasons and fmt.name != "fp8":
            assert reasons[model_type] in plan.refusals[0]
            return
    assert plan.refusals == ()
    blocks = family(model_type, "here").blocks
    assert {row.name for row in plan.rows if row.scheme} == {r.name for r in plan.rows if r.name.startswith(blocks)}
    assert plan.bytes_after < plan.bytes_before or not fmt.packs


def test_shipped_recipes_are_files_by_name() -> None:
    assert {"gptq-4bit", "rtn-4bit"} <= set(recipe_names())
    assert "models" not in recipe_names()
    file = load("gptq-4bit")
    assert file.name == "gptq-4bit"
    assert file.path.read_text() == file.text
    assert load(str(file.path)).recipe == file.recipe


# ---- what a recipe says


def test_document_spells_out_the_defaults() -> None:
    recipe = parse(GPTQ, "my.yaml")
    assert recipe.document() == {
        "version": 1,
        "summary": "a test",
        "steps": [
            {
                "method": "gptq", "scheme": "W4A16", "group_size": None, "group_fallback": [],
                "ignore": ["lm_head"], "overrides": [], "actorder": "static", "scale_search": True,
                "damping": 0.005,
            }
        ],
        "calibration": {"dataset": "auto", "samples": 128, "seq_len": 512, "seed": 0},
        "kv_cache": None,
        "format": "compressed-tensors",
        "evaluate": {"suite": "embedded", "delta": 0.01},
    }  # fmt: skip


def test_document_is_a_recipe_again() -> None:
    import yaml

    recipe = parse(OVERRIDE + "{weights: {num_bits: 8}}\nformat: dense\n", "my.yaml")
    assert parse(yaml.safe_dump(recipe.document()), "again.yaml") == recipe


def test_frozen_all_the_way_down() -> None:
    recipe = parse(OVERRIDE + "{weights: {num_bits: 8}}\n", "my.yaml")
    step = recipe.steps[0]
    override = step.overrides[0]
    assert isinstance(override.scheme, Scheme)
    for part, key in [
        (recipe, "summary"), (recipe.calibration, "samples"), (recipe.evaluate, "suite"),
        (step, "group_size"), (override, "match"), (override.scheme.weights, "num_bits"),
    ]:  # fmt: skip
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, key, getattr(part, key))
    assert all(isinstance(value, tuple) for value in (recipe.steps, step.ignore, step.overrides))


def test_a_step_has_its_own_methods_keys() -> None:
    assert parse(GPTQ + "    damping: 0.1\n", "my.yaml").steps[0].model_dump()["damping"] == 0.1
    assert "unknown key 'damping'" in refusal(RTN + "    damping: 0.1\n").what


def test_scheme_of() -> None:
    assert scheme_of("W4A16") is PRESETS["W4A16"]
    assert scheme_of(PRESETS["W8A16"]) is PRESETS["W8A16"]
    assert scheme_of("dense") is None


# ---- mistakes

SPELLING: dict[str, tuple[str, int, str, str, str]] = {
    # what is wrong: (text, line, key, the word, the nearest)
    "method": (HEAD.replace("rtn", "gptqq") + "    scheme: W4A16\n", 4, "steps.0.method", "gptqq", "gptq"),
    "scheme": (HEAD + "    scheme: W4A61\n", 5, "steps.0.scheme", "W4A61", "W4A16"),
    "format": (RTN + "format: compresed-tensors\n", 6, "format", "compresed-tensors", "compressed-tensors"),
    "key": (RTN + "formt: dense\n", 6, "formt", "formt", "format"),
    "key of a step": (RTN + "    group_sise: 64\n", 6, "steps.0.group_sise", "group_sise", "group_size"),
    "key of calibration": (
        RTN + "calibration:\n  seed: 1\n  sampels: 4\n", 8, "calibration.sampels", "sampels", "samples",
    ),
    "key of evaluate": (RTN + "evaluate: {suit: x}\n", 6, "evaluate.suit", "suit", "suite"),
    "key of an override": (
        OVERRIDE + "W8A16\n        shceme: W4A16\n", 9, "steps.0.overrides.0.shceme", "shceme", "scheme",
    ),
    "key of a scheme": (
        HEAD + "    scheme:\n      weights: {num_bits: 4, symetric: true}\n",
        6, "steps.0.scheme.weights.symetric", "symetric", "symmetric",
    ),
    "required key of a step": (HEAD + "    shceme: W4A16\n", 5, "steps.0.shceme", "shceme", "scheme"),
    "required key of an override": (
        RTN + "    overrides:\n      - math: x\n        scheme: W8A16\n",
        7, "steps.0.overrides.0.math", "math", "match",
    ),
    "required key of a scheme": (
        HEAD + "    scheme:\n      weights: {num_bit: 4}\n",
        6, "steps.0.scheme.weights.num_bit", "num_bit", "num_bits",
    ),
    "override's scheme": (OVERRIDE + "W8A61\n", 8, "steps.0.overrides.0.scheme", "W8A61", "W8A16"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLING)
def test_misspelt(case: str) -> None:
    text, line, key, word, nearest = SPELLING[case]
    error = refusal(text)
    assert error.what.startswith("unknown ")
    assert repr(word) in error.what
    assert f"did you mean {nearest!r}" in error.what
    assert nearest in error.what.split("Allowed: ")[1].split(", ")
    assert error.where == f"my.yaml:{line} ({key})"


def test_the_choices_are_named() -> None:
    assert "gptq, rtn" in refusal(HEAD.replace("rtn", "awq?") + "    scheme: W4A16\n").what
    assert ", ".join(sorted(METHODS)) in refusal(HEAD.replace("rtn", "???") + "    scheme: W4A16\n").what


WRONG_VALUE: dict[str, tuple[str, int, str, str]] = {
    # what is wrong: (text, line, key, words of the message)
    "too small a group": (RTN + "    group_size: 4\n", 6, "steps.0.group_size", "8.* 4"),
    "a fallback of nothing": (RTN + "    group_fallback: [0]\n", 6, "steps.0.group_fallback.0", "8.* 0"),
    "a negative fallback": (RTN + "    group_fallback: [-64]\n", 6, "steps.0.group_fallback.0", "8.* -64"),
    "a word for a number": (RTN + "    group_size: many\n", 6, "steps.0.group_size", "integer.*'many'"),
    "damping": (GPTQ + "    damping: 2\n", 6, "steps.0.damping", "1 .*2"),
    "an act-order that is gone": (GPTQ + "    actorder: weight\n", 6, "steps.0.actorder", "'static'.*'group'"),
    "no samples": (RTN + "calibration: {samples: 0}\n", 6, "calibration.samples", "1 .*0"),
    "short windows": (RTN + "calibration:\n  seq_len: 7\n", 7, "calibration.seq_len", "8 .*7"),
    "delta": (RTN + "evaluate:\n  delta: 1\n", 7, "evaluate.delta", "less than 1"),
    "another version": (RTN.replace("version: 1", "version: 2"), 1, "version", "1 .*2"),
    "a list for a text": (RTN.replace("a test", "[a, b]"), 2, "summary", "string"),
    "one pattern for a list": (RTN + "    ignore: lm_head\n", 6, "steps.0.ignore", "'lm_head'"),
    "too many bits in an override": (
        OVERRIDE + "\n          weights:\n            num_bits: 9\n",
        10, "steps.0.overrides.0.scheme.weights.num_bits", "8 .*9",
    ),
    "groups of no size in an override": (
        OVERRIDE + "\n          weights: {num_bits: 4, strategy: group}\n",
        9, "steps.0.overrides.0.scheme.weights", "group_size",
    ),
    "a scale for each token of a weight": (
        HEAD + "    scheme: {weights: {num_bits: 4, strategy: token}}\n", 5, "steps.0.scheme", "token",
    ),
    "a weight's scale found while running": (
        HEAD + "    scheme: {weights: {num_bits: 4, dynamic: true}}\n", 5, "steps.0.scheme", "dynamic",
    ),
    "a number for a scheme": (OVERRIDE + "4\n", 8, "steps.0.overrides.0.scheme", "string.*4"),
    "no step": ("version: 1\nsummary: s\nsteps: []\n", 3, "steps", "at least one step"),
    "steps missing": ("version: 1\nsummary: s\n", 1, "steps", "at least one step"),
    "steps not a list": ("version: 1\nsummary: s\nsteps: {method: rtn}\n", 3, "steps", "list"),
    "a step that is a word": ("version: 1\nsummary: s\nsteps:\n  - rtn\n", 4, "steps.0", "mapping"),
    "a step without method": ("version: 1\nsummary: s\nsteps:\n  - scheme: W4A16\n", 4, "steps.0", "`method`"),
    "a step without scheme": (HEAD, 4, "steps.0.scheme", "required"),
    "no summary": (RTN.replace("summary: a test\n", ""), 1, "summary", "required"),
    "two solving steps": (
        RTN + "  - method: gptq\n    scheme: W8A16\n", 3, "steps", "rtn and gptq.*coded once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_VALUE)
def test_wrong_value(case: str) -> None:
    text, line, key, words = WRONG_VALUE[case]
    error = refusal(text)
    assert re.search(words, error.what)
    assert error.where is not None
    assert error.where.startswith(f"my.yaml:{line} ({key}")


def test_what_is_missing_does_not_spill_the_whole_recipe() -> None:
    assert len(refusal(RTN.replace("summary: a test\n", "")).what) < 80


NOT_YAML: dict[str, tuple[str, str, str]] = {
    # what is wrong: (text, where, words of the message)
    "an open bracket": ("version: 1\nsummary: [s\nsteps: x\n", "my.yaml:3", "expected ',' or ']'"),
    "a tab": ("version: 1\n\tsummary: s\n", "my.yaml:2", r"'\\t'"),
    "a missing anchor": ("version: *one\n", "my.yaml:1", "undefined alias 'one'"),
    "two documents": (RTN + "---\nversion: 1\n", "my.yaml:6", "another document"),
    "a control character": ("version: 1\x00\n", "my.yaml", "#x0000"),
    "a list": ("- a\n", "my.yaml", "expected a mapping"),
    "nothing": ("", "my.yaml", "expected a mapping"),
    "a doubled key": (RTN + "summary: b\n", "my.yaml:6", "'summary' appears twice"),
    "a doubled key in a step": (RTN + "    scheme: W8A16\n", "my.yaml:6", "'scheme' appears twice"),
    "an object": ("version: !!python/name:os.system\n", "my.yaml:1", "tag.*os.system"),
    "a document inside itself": ("version: 1\nsteps: &steps\n  - *steps\n", "my.yaml", "."),
    "brackets without end": ("[" * 5000, "my.yaml", "."),
}


@pytest.mark.parametrize("case", NOT_YAML)
def test_not_a_recipe_at_all(case: str) -> None:
    text, where, words = NOT_YAML[case]
    error = refusal(text)
    assert re.search(words, error.what)
    assert error.where is not None
    assert error.where.startswith(where)


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    error = refusal(f"version: 1\nsummary: !!python/object/apply:os.mkdir ['{proof}']\n")
    assert "os.mkdir" in error.what
    assert error.where == "my.yaml:2"
    assert not proof.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gptq-4bits", "did you mean 'gptq-4bit'"),
        ("gptq-4bits", ", ".join(recipe_names())),
        ("no/such.yaml", "no recipe file 'no/such.yaml'"),
        ("gptq-4bit.yml", "no recipe file"),
    ],
)
def test_no_such_recipe(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompressError) as caught:
        load(name)
    assert words in caught.value.what
    assert caught.value.hint


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"summary: caf\xe9\n")
    with pytest.raises(CompressError, match="not UTF-8") as caught:
        load(str(path))
    assert caught.value.where == f"{path}:1"


def test_errors_name_the_file_that_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RTN + "formt: dense\n")
    with pytest.raises(CompressError) as caught:
        load(str(path))
    assert caught.value.where == f"{path}:6 (formt)"


def test_a_recipe_name_is_read_as_text_not_as_a_tuple_of_letters() -> None:
    recipe: Any = parse(RTN + "    ignore: [lm_head, '*.q_proj']\n", "my.yaml")
    assert recipe.steps[0].ignore == ("lm_head", "*.q_proj")
