"""The plan: every weight's fate, bytes by hand, and refusals that name weights and choices; no weights needed."""

import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTiny

from compress.errors import CompressError
from compress.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.formats.dense import DENSE
from compress.job import prepare
from compress.models.family import ModelFamily
from compress.models.llama import LLAMA
from compress.models.phi3 import PHI3
from compress.models.shapes import ModelShapes
from compress.plan import Plan, make_plan
from compress.plan_rows import matches
from compress.plan_text import folded, plan_text
from compress.recipe import parse
from compress.schemes import Scheme

DATA = {"dataset": "embedded", "asked": "auto", "reason": "", "tokens": 512, "heldout": 256, "seq_len": 128}
WIDTHS = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}  # fmt: skip


def shapes(*, layers: int = 2, hidden: int = 64, tied: bool = False, positions: int = 1024) -> ModelShapes:
    """A llama of layers × WIDTHS, `hidden` in place of 64."""
    at = {64: hidden}
    linears = [
        (f"model.layers.{i}.{name}", (at.get(o, o), at.get(w, w)))
        for i in range(layers)
        for name, (o, w) in WIDTHS.items()
    ]
    return ModelShapes(
        linears=(*linears, ("lm_head", (320, hidden))), other_params=1000, block_count=layers,
        hidden_size=hidden, vocab_size=320, max_position=positions, kv_bytes_per_token=256, tied=tied,
    )  # fmt: skip


def plan_of(
    step: str,
    model: ModelShapes | None = None,
    *,
    format: str = "compressed-tensors",
    family: ModelFamily = LLAMA,
    names: tuple[str, str] = ("tiny", "mine"),
    **data: Any,
) -> Plan:
    """A plan of one rtn or gptq step, written as a YAML flow mapping."""
    recipe = parse(f"version: 1\nsummary: s\nsteps: [{step}]\nformat: {format}\n", "my.yaml")
    fmt = {"compressed-tensors": COMPRESSED_TENSORS, "dense": DENSE}[format]
    return make_plan(recipe, model or shapes(), family, fmt, names=names, calibration={**DATA, **data})


def fates(plan: Plan) -> dict[str, str]:
    return {row.name: row.scheme.text if row.scheme else "dense" for row in plan.rows}


# ---- families


def test_transposed_layers_need_a_format_that_holds_them() -> None:
    name = "model.layers.0.mlp.down_proj"
    model = dataclasses.replace(shapes(), transposed=frozenset({name}))
    (refusal,) = plan_of("{method: rtn, scheme: W8A16}", model).refusals
    assert all(word in refusal for word in ("compressed-tensors", name, "Conv1D", "dense"))
    assert plan_of("{method: rtn, scheme: W8A16}", model, format="dense").refusals == ()
    assert plan_of("{method: rtn, scheme: W8A16, ignore: [lm_head, down_proj]}", model).refusals == ()


def test_a_family_known_by_its_structure_says_so() -> None:
    family = dataclasses.replace(LLAMA, model_type="other", fused=(), pairs=(), inferred=True)
    (note,) = plan_of("{method: rtn, scheme: W8A16}", family=family).notes
    assert "'other' is known by its structure alone" in note


def test_a_family_that_transformers_only_loads_expanded() -> None:
    """Falcon's own linear layers: said of weights alone, refused with activations, which would be left as they are."""
    falcon = dataclasses.replace(LLAMA, model_type="falcon")
    plan = plan_of("{method: rtn, scheme: W8A16}", family=falcon)
    assert plan.refusals == ()
    assert any("quantized falcon" in note and "dequantize=True" in note for note in plan.notes)
    (refusal,) = plan_of("{method: rtn, scheme: W8A8}", family=falcon).refusals
    assert all(word in refusal for word in ("compressed-tensors", "falcon", "activations", "no format here can"))


def test_act_order_by_group_is_for_integers_in_groups() -> None:
    (refusal, *_) = plan_of("{method: gptq, scheme: NVFP4A16, actorder: group}").refusals
    assert "integers in groups" in refusal
    (refusal,) = plan_of("{method: gptq, scheme: W4A16, group_size: 32, actorder: group}").refusals
    assert "columns' order" in refusal
    assert "formats that can: gptq" in refusal


# ---- smoothing


def smoothing_notes(step: str) -> list[str]:
    model = dataclasses.replace(shapes(layers=3), pairs=LLAMA.pairs)
    return [note for note in plan_of(step, model).notes if "awq" in note]


def test_the_plan_says_which_channels_are_scaled_and_where_not() -> None:
    awq = "method: awq, scheme: W4A16, group_size: 32"
    assert [note for note in smoothing_notes(f"{{{awq}}}") if "leaves" in note] == []
    (note,) = [n for n in smoothing_notes(f"{{{awq}, ignore: [lm_head, o_proj]}}") if "o_proj" in n]
    assert note == "awq leaves v_proj → o_proj as they are in 3 blocks: self_attn.o_proj is not quantized"
    overrides = "overrides: [{match: model.layers.1.mlp.up_proj, scheme: dense}]"
    notes = smoothing_notes(f"{{{awq}, {overrides}}}")
    assert "awq: post_attention_layernorm → gate_proj, up_proj are scaled, in 2 blocks" in notes
    assert "awq: up_proj → down_proj are scaled" in notes  # a dense source is divided as it is
    source = "overrides: [{match: v_proj, scheme: NVFP4A16}]"
    (note,) = [n for n in smoothing_notes(f"{{{awq}, {source}}}") if "v_proj → o_proj" in n]
    assert "in 3 blocks: the rows of self_attn.v_proj" in note


# ---- groups


def test_group_fallback_serves_the_whole_model_and_says_so() -> None:
    model = shapes(hidden=576)
    plan = plan_of("{method: rtn, scheme: W4A16, group_fallback: [64, 32]}", model)
    assert plan.refusals == ()
    assert set(fates(plan).values()) == {"int4 sym group 64", "dense"}
    (note,) = plan.notes
    assert "group_size 128 does not divide the input width 576" in note
    assert "group_size 64" in note
    assert " ".join(plan_text(plan).split()).count(note) == 1


def test_the_first_fallback_that_divides_is_taken() -> None:
    plan = plan_of("{method: rtn, scheme: W4A16, group_fallback: [48, 32, 16]}")
    assert fates(plan)["model.layers.0.mlp.down_proj"] == "int4 sym group 32"


def test_no_fallback_where_none_is_needed() -> None:
    plan = plan_of("{method: rtn, scheme: W4A16, group_fallback: [64, 32]}", shapes(hidden=256))
    assert fates(plan)["model.layers.0.self_attn.q_proj"] == "int4 sym group 128"
    assert plan.notes == ()


def test_ignored_and_overridden_weights_do_not_choose_the_group() -> None:
    model = shapes(hidden=576)
    skipped = "ignore: [lm_head, '*_proj'], overrides: []"
    narrow = "overrides: [{match: 'mlp.down_proj', scheme: W4A16}], ignore: [lm_head, self_attn.*, mlp.*p_proj, "
    plan = plan_of(f"{{method: rtn, scheme: W4A16, {narrow} gate_proj]}}", model)
    assert plan.refusals == ()  # down_proj alone is 128 wide
    assert fates(plan)["model.layers.1.mlp.down_proj"] == "int4 sym group 128"
    assert "no weight would be quantized" in plan_of(f"{{method: rtn, scheme: W4A16, {skipped}}}").refusals[0]


def test_a_group_that_does_not_divide_is_refused_with_names_and_choices() -> None:
    plan = plan_of("{method: rtn, scheme: W4A16}", shapes(hidden=576))
    (refusal,) = plan.refusals
    assert "group_size 128 does not divide" in refusal
    assert "12 weights" in refusal  # six of seven in both layers
    assert "model.layers.0.self_attn.q_proj, 576 wide" in refusal
    assert "[64, 32, 16]" in refusal


def test_where_no_group_divides_channels_are_advised() -> None:
    plan = plan_of("{method: rtn, scheme: W4A16, group_fallback: [64]}", shapes(hidden=72))
    assert "per channel" in plan.refusals[0]


def test_an_override_s_group_is_checked_too() -> None:
    plan = plan_of("{method: rtn, scheme: W8A16, overrides: [{match: '*.1.self_attn.q_proj', scheme: W4A16}]}")
    (refusal,) = plan.refusals
    assert re.search(r"model\.layers\.1\.self_attn\.q_proj is 64 wide.*128", refusal)


@pytest.mark.parametrize("scheme", ["NVFP4A16", "FP8_DYNAMIC", "W8A8"])
def test_a_grain_that_is_the_formats_own_is_not_changed(scheme: str) -> None:
    (refusal,) = plan_of(f"{{method: rtn, scheme: {scheme}, group_size: 64}}").refusals
    assert "group_size 64 does not go with" in refusal
    assert "leave group_size out" in refusal


def test_blocks_that_do_not_divide_are_refused_with_widths_and_choices() -> None:
    (refusal,) = plan_of("{method: rtn, scheme: FP8_BLOCK}", shapes(hidden=576)).refusals
    assert "14 weights cannot be float8 block 128×128" in refusal
    assert "model.layers.0.self_attn.q_proj" in refusal
    assert "576 rows and 576 columns" in refusal
    assert "use FP8 or FP8_DYNAMIC or NVFP4A16 or MXFP4A16" in refusal
    (refusal,) = plan_of("{method: rtn, scheme: MXFP4A16}", shapes(hidden=80)).refusals
    assert "group_size 32 does not divide its input width 80" in refusal
    assert "NVFP4A16" in refusal
    step = "{method: rtn, scheme: W8A16, overrides: [{match: '*.0.mlp.up_proj', scheme: FP8_BLOCK}]}"
    (refusal,) = plan_of(step).refusals
    assert re.search(r"layers\.0\.mlp\.up_proj cannot have its override's scheme: block_structure", refusal)


@pytest.mark.parametrize(
    ("step", "statistics"),
    [
        ("{method: rtn, scheme: FP8_DYNAMIC}", "none"),
        ("{method: rtn, scheme: FP8}", "absmax"),
        ("{method: rtn, scheme: W8A16, overrides: [{match: up_proj, scheme: W8A8_STATIC}]}", "absmax"),
        ("{method: gptq, scheme: W8A8_STATIC}", "gram"),
    ],
)
def test_static_activations_need_data_and_nothing_else_does(step: str, statistics: str) -> None:
    plan = plan_of(step)
    assert (plan.refusals, plan.statistics) == ((), statistics)


def test_asymmetric_weights_stand_alone() -> None:
    step = "{method: rtn, scheme: W8A16, overrides: [{match: up_proj, scheme: W4A16_ASYM}], group_fallback: [64]}"
    (refusal,) = plan_of(step).refusals
    assert "asymmetric weights beside another scheme" in refusal
    assert plan_of(step, format="dense").refusals == ()


# ---- overrides and what is left alone


def test_the_first_matching_override_wins() -> None:
    plan = plan_of(
        "{method: rtn, scheme: W8A16, overrides: [{match: '*.0.mlp.down_proj', scheme: dense}, "
        "{match: '*.down_proj', scheme: W4A16}, {match: '*.mlp.*', scheme: W3A16, }], "
        "ignore: [lm_head, gate_proj, up_proj]}"
    )
    found = fates(plan)
    assert found["model.layers.0.mlp.down_proj"] == "dense"
    assert found["model.layers.1.mlp.down_proj"] == "int4 sym group 128"
    assert found["model.layers.1.self_attn.q_proj"] == "int8 sym channel"
    why = {row.name: row.reason for row in plan.rows}
    assert why["model.layers.0.mlp.down_proj"] == "left dense by an override"
    assert why["model.layers.1.mlp.down_proj"] == "override"
    assert why["model.layers.1.mlp.up_proj"] == "ignored by the recipe"
    assert set(plan.schemes()) == {name for name, fate in found.items() if fate != "dense"}


def test_a_whole_scheme_as_an_override() -> None:
    scheme = "{weights: {num_bits: 3, symmetric: false, strategy: group, group_size: 16}}"
    plan = plan_of(f"{{method: rtn, scheme: W8A16, overrides: [{{match: v_proj, scheme: {scheme}}}]}}")
    assert fates(plan)["model.layers.0.self_attn.v_proj"] == "int3 asym group 16"


def test_patterns_match_whole_names_or_their_last_parts() -> None:
    name = "model.layers.0.mlp.down_proj"
    assert all(matches(name, p) for p in (name, "down_proj", "mlp.down_proj", "*.mlp.*", "model.layers.[01].*"))
    assert not any(matches(name, p) for p in ("own_proj", "mlp", "DOWN_PROJ", "layers.0"))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("overrides: [{match: '*.down', scheme: W4A16}]", "overrides: '*.down'"),
        ("ignore: [lm_head, router]", "ignore: 'router'"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(keys: str, key: str) -> None:
    (refusal,) = plan_of(f"{{method: rtn, scheme: W8A16, {keys}}}").refusals
    assert f"{key} matches no weight" in refusal
    assert "model.layers.0.self_attn.q_proj" in refusal


@pytest.mark.parametrize(("tied", "why"), [(True, "its weights are the embedding's"), (False, "only blocks")])
def test_a_head_that_is_not_ignored_is_refused(tied: bool, why: str) -> None:
    plan = plan_of("{method: rtn, scheme: W8A16, ignore: []}", shapes(tied=tied))
    (refusal,) = plan.refusals
    assert refusal.startswith("lm_head cannot be quantized")
    assert why in refusal
    assert "`ignore`" in refusal
    assert "lm_head" not in plan.schemes()


def test_the_default_ignore_suits_a_model_without_a_head() -> None:
    model = shapes()
    headless = ModelShapes(**{**model.__dict__, "linears": model.linears[:-1]})
    assert plan_of("{method: rtn, scheme: W8A16}", headless).refusals == ()


# ---- formats and families


@pytest.mark.parametrize(
    ("scheme", "format", "words"),
    [
        ("{weights: {num_bits: 4, strategy: tensor}}", "compressed-tensors", "int4 sym tensor.*whole tensor"),
        (
            "{weights: {num_bits: 8}, input_activations: {num_bits: 8, strategy: token, dynamic: true}}",
            "dense",
            "int8 sym channel . act int8 token.*activations",
        ),
    ],
)
def test_a_scheme_that_the_format_cannot_hold_is_refused(scheme: str, format: str, words: str) -> None:
    (refusal,) = plan_of(f"{{method: rtn, scheme: {scheme}}}", format=format).refusals
    assert re.search(f"format {format} cannot hold .*{words}", refusal)


def test_every_scheme_is_asked_of_the_format_also_an_override_s() -> None:
    tensor = "{weights: {num_bits: 8, strategy: tensor}}"
    plan = plan_of(f"{{method: rtn, scheme: W8A16, overrides: [{{match: q_proj, scheme: {tensor}}}]}}")
    assert any("cannot hold int8 sym tensor" in refusal for refusal in plan.refusals)


def test_fused_layers_that_differ_are_noted_where_the_family_fuses() -> None:
    step = "{method: rtn, scheme: W8A16, overrides: [{match: '*.0.self_attn.v_proj', scheme: dense}]}"
    (note,) = plan_of(step).notes
    assert re.search(r"model\.layers\.0\..*v_proj.*differ in scheme.*vLLM", note)
    assert plan_of(step, family=PHI3).notes == ()
    whole = "{method: rtn, scheme: W8A16, overrides: [{match: '*.0.self_attn.[qkv]_proj', scheme: dense}]}"
    assert plan_of(whole).notes == ()


def test_windows_longer_than_the_models_positions_are_refused() -> None:
    step = "{method: rtn, scheme: W8A16}"
    (refusal,) = plan_of(step, shapes(positions=100)).refusals
    assert re.search(r"seq_len 128 .* 100 positions", refusal)
    assert plan_of(step, shapes(positions=128)).refusals == ()
    assert plan_of(step, shapes(positions=0)).refusals == ()  # the config does not say


def test_all_refusals_at_once() -> None:
    step = "{method: rtn, scheme: W4A16, ignore: [router], group_size: 96}"
    assert len(plan_of(step, shapes(positions=8)).refusals) == 4


# ---- arithmetic


@pytest.mark.parametrize(
    ("scheme", "q_proj", "k_proj", "down_proj"),
    [
        # codes in 32-bit words along a row + scales of 2 bytes + zero points in words along O + 16 for the shape
        ("{method: rtn, scheme: W8A16}", 4096 + 2 * 64 + 16, 2048 + 2 * 32 + 16, 8192 + 2 * 64 + 16),
        (
            "{method: rtn, scheme: W4A16, group_size: 32}",
            2048 + 2 * 128 + 16, 1024 + 2 * 64 + 16, 4096 + 2 * 256 + 16,
        ),
        (
            "{method: rtn, scheme: W4A16_ASYM, group_size: 64}",
            2048 + 2 * 64 + 4 * 8 + 16, 1024 + 2 * 32 + 4 * 4 + 16, 4096 + 2 * 128 + 2 * 4 * 8 + 16,
        ),
        (
            "{method: rtn, scheme: W3A16, group_size: 64}",
            4 * 6 * 64 + 2 * 64 + 16, 4 * 6 * 32 + 2 * 32 + 16, 4 * 12 * 64 + 2 * 128 + 16,
        ),
    ],
)  # fmt: skip
def test_bytes_by_hand(scheme: str, q_proj: int, k_proj: int, down_proj: int) -> None:
    plan = plan_of(scheme)
    after = {row.name.removeprefix("model.layers.0."): row.bytes_after for row in plan.rows}
    assert after["self_attn.q_proj"] == q_proj
    assert after["self_attn.k_proj"] == k_proj
    assert after["mlp.down_proj"] == down_proj
    assert after["lm_head"] == 2 * 320 * 64


@pytest.mark.parametrize("tied", [True, False])
def test_the_models_bytes_and_bits_by_hand(tied: bool) -> None:
    plan = plan_of("{method: rtn, scheme: W8A16}", shapes(tied=tied))
    weights = 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 3 * 128 * 64)
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    rest = 2 * 1000 + (0 if tied else 2 * 320 * 64)  # a tied head is the embedding, counted there
    assert plan.bytes_before == rest + 2 * weights
    assert plan.bytes_after == rest + weights + 2 * rows + 14 * 16
    assert plan.bpw == pytest.approx(8 * (weights + 2 * rows + 14 * 16) / weights)
    assert plan.kv_bytes_per_token == 256
    head = plan.rows[-1]
    assert (head.bytes_before, head.bytes_after) == ((0, 0) if tied else (2 * 320 * 64,) * 2)


def test_the_rows_add_up_to_the_plan() -> None:
    for format in ("compressed-tensors", "dense"):
        plan = plan_of("{method: rtn, scheme: W8A16}", format=format)
        assert plan.bytes_before == 2000 + sum(row.bytes_before for row in plan.rows)
        assert plan.bytes_after == 2000 + sum(row.bytes_after for row in plan.rows), format


def test_statistics_cost_memory_and_disk() -> None:
    free, few = plan_of("{method: rtn, scheme: W8A16}"), plan_of("{method: gptq, scheme: W8A16}")
    many = plan_of("{method: gptq, scheme: W8A16}", tokens=1 << 20)
    huge = plan_of("{method: gptq, scheme: W8A16}", tokens=1 << 22)
    assert (free.statistics, few.statistics) == ("none", "gram")
    assert free.memory_bytes < few.memory_bytes < many.memory_bytes
    assert free.disk_bytes < few.disk_bytes < many.disk_bytes
    assert many.sequential
    assert not huge.sequential  # 4 · 2²² · (2 · 64 + 128) bytes are over the limit
    assert huge.memory_bytes < many.memory_bytes


# ---- as text and as JSON


def expand(name: str) -> list[str]:
    """The weights that a folded name such as model.layers.{0-2,5}.mlp.up_proj stands for."""
    spans = re.search(r"\{(.*)\}", name)
    if not spans:
        return [name]
    ends = [(int(s.split("-")[0]), int(s.split("-")[-1])) for s in spans[1].split(",")]
    return [name.replace(spans[0], str(n)) for a, b in ends for n in range(a, b + 1)]


EVERY_OTHER = "".join(f"{{match: '*.{i}.mlp.down_proj', scheme: dense}}, " for i in range(0, 40, 2))


@pytest.mark.parametrize(
    "step",
    [
        "{method: gptq, scheme: W4A16_ASYM, group_fallback: [64, 32]}",
        "{method: rtn, scheme: W4A16, group_size: 96, ignore: [router]}",
        f"{{method: rtn, scheme: W8A16, overrides: [{EVERY_OTHER}]}}",
    ],
)
@pytest.mark.parametrize("model", ["tiny", "HuggingFaceTB--SmolLM2-135M-Instruct-and-then-some"])
def test_text_is_narrow_and_names_every_weight(step: str, model: str) -> None:
    plan = plan_of(step, shapes(layers=40, hidden=576), names=(model, "gptq-4bit"), dataset="file:" + "/a" * 60)
    text = plan_text(plan)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    names = [name for name, _, _ in folded(plan.rows)]
    assert sorted(weight for name in names for weight in expand(name)) == sorted(r.name for r in plan.rows)
    squeezed = "".join(text.split())  # a long name may be wrapped, not cut
    assert [name for name in names if name not in squeezed] == []
    flat = " ".join(text.split())
    assert all(refusal in flat for refusal in plan.refusals)
    assert text.count("REFUSED") == len(plan.refusals)


def test_folding_keeps_apart_what_differs() -> None:
    plan = plan_of(
        "{method: rtn, scheme: W8A16, overrides: [{match: 'layers.[13].mlp.down_proj', scheme: dense}]}",
        shapes(layers=5),
    )
    rows = {name: (count, row.scheme is None) for name, row, count in folded(plan.rows)}
    assert rows["model.layers.{0,2,4}.mlp.down_proj"] == (3, False)
    assert rows["model.layers.{1,3}.mlp.down_proj"] == (2, True)
    assert rows["model.layers.{0-4}.self_attn.q_proj"] == (5, False)
    assert rows["lm_head"] == (1, True)
    assert sum(count for count, _ in rows.values()) == len(plan.rows)


def test_text_says_the_fate_and_the_reason() -> None:
    text = plan_text(plan_of("{method: rtn, scheme: W4A16, group_size: 32}", shapes(tied=True)))
    head, reason = text[text.index("\nlm_head") :].strip().splitlines()[:2]
    assert head.split() == ["lm_head", "320×64", "dense"]
    assert reason.endswith("ignored by the recipe; tied to the embedding")
    assert re.search(r"bits per quantized weight +4\.5", text)
    assert re.search(r"calibration data +none needed", text)


def test_document_round_trip() -> None:
    plan = plan_of("{method: rtn, scheme: W8A16, overrides: [{match: down_proj, scheme: W4A16}]}")
    document = plan.document()
    assert json.loads(json.dumps(document)) == document
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [row.name for row in plan.rows]
    schemes = {n: Scheme.model_validate(r["scheme"]) for n, r in rows.items() if r["scheme"]}
    assert schemes == plan.schemes()
    assert rows["lm_head"]["scheme"] is None
    for key in ("model", "recipe", "format", "bytes_before", "bytes_after", "bpw", "memory_bytes", "disk_bytes"):
        assert document[key] == getattr(plan, key)
    assert document["refusals"] == list(plan.refusals)


# ---- without weights, without a network


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"planning went to the network: {args}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("no_network")
def test_an_alias_is_planned_offline_and_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    job = prepare("gptq-4bit", "llama3-8b")
    assert job.source.path is None
    with pytest.raises(AssertionError, match="reads no weights"):
        job.model.block(0)
    assert job.source.path is None
    plan = job.plan
    assert plan.refusals == ()
    assert len(plan.rows) == 7 * 32 + 1
    assert plan.bytes_before == 2 * 8_030_261_248
    assert plan.bpw == pytest.approx(4 + 16 / 128, abs=1e-3)
    assert plan.bytes_after == pytest.approx(2 * 1_050_939_392 + 6_979_321_856 * (4 + 16 / 128) / 8, rel=1e-3)
    assert plan.calibration["dataset"] == "embedded"
    assert plan.calibration["reason"]


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_planned_by_its_headers_and_not_without_weights(tiny: MakeTiny, tmp_path: Path) -> None:
    whole = tiny("llama", tied=True)
    job = prepare("rtn-4bit", str(whole))
    assert job.plan.refusals == ()
    with pytest.raises(AssertionError, match="reads no weights"):
        job.model.block(0)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with pytest.raises(CompressError, match="there are no weights"):
        prepare("rtn-4bit", str(tmp_path))
