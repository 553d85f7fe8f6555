"""Quantized inputs: off until switched on, in every pass of the walk from the moment a weight is set, and from disk."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from compress import activations
from compress.activations import QuantizedInput, wire_inputs
from compress.artifact import CodedModel, coded_activations, open_artifact
from compress.calibration.state import open_state
from compress.calibration.walk import WalkSpec, walk
from compress.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.formats.dense import DENSE
from compress.methods.rtn import RtnConfig, step
from compress.models.llama import LLAMA
from compress.models.load import linears, open_model
from compress.numerics import quantize_activations
from compress.plan import make_plan
from compress.recipe import parse
from compress.runtimes.hf import HfRuntime
from compress.schemes import KV_CACHES, PRESETS
from tests.conftest import MakeTiny
from tests.test_pipeline import run, write_recipe
from tests.test_plan import DATA, shapes

LAYERS = 7


def tokens(rows: int, seed: int, length: int = 24) -> Tensor:
    return torch.randint(3, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of everything that a layer rounded."""
    seen: list[torch.Size] = []

    def spy(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.shape)
        return quantize_activations(x, *rest)

    monkeypatch.setattr(activations, "quantize_activations", spy)
    return seen


def test_a_rounding_is_off_until_it_is_switched_on() -> None:
    block = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 4)})
    schemes = {"m.a": PRESETS["FP8_DYNAMIC"], "m.b": PRESETS["W8A16"], "other.a": PRESETS["W8A8"]}
    wired = wire_inputs(block, "m", schemes)
    assert wired.keys() == {"m.a"}
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    plain = {name: layer(x) for name, layer in block.items()}
    assert torch.equal(nn.functional.linear(x, block["a"].weight, block["a"].bias), plain["a"])
    wired["m.a"].switch_on(None)
    rounded = quantize_activations(x, wired["m.a"].args)
    assert torch.equal(block["a"](x), nn.functional.linear(rounded, block["a"].weight, block["a"].bias))
    assert torch.equal(block["b"](x), plain["b"])


def test_static_inputs_want_a_scale_and_dynamic_ones_none() -> None:
    for name, scale in (("FP8", None), ("FP8_DYNAMIC", torch.ones(1))):
        args = PRESETS[name].input_activations
        assert args is not None
        with pytest.raises(AssertionError):
            QuantizedInput(args).switch_on(scale)


@pytest.mark.parametrize("sequential", [True, False])
def test_the_calibration_tokens_go_through_quantized_inputs(
    sequential: bool, tiny: MakeTiny, tmp_path: Path, calls: list[torch.Size]
) -> None:
    """Also the layer that every batch was waiting in front of while it was solved."""
    folder = tiny("llama", tied=True, layers=1)
    model = open_model(folder, json.loads((folder / "config.json").read_text()))
    names = [name for name, _, _ in linears(model.skeleton) if name != "lm_head"]
    spec = WalkSpec(
        schemes=dict.fromkeys(names, PRESETS["FP8"]), encode=COMPRESSED_TENSORS.encode,
        decode=COMPRESSED_TENSORS.decode, sequential=sequential, dtype=torch.float32, gram=False,
    )  # fmt: skip
    windows = (tokens(90, 0), tokens(2, 1))  # two batches
    state = open_state(tmp_path, windows, 64, True)
    assert state is not None
    assert state.calibration is not None
    for block in walk(model, windows, spec, state, lambda done, total: None):
        step(block, block.schemes, RtnConfig(scheme="FP8"))
        assert len(calls) == (2 * LAYERS if sequential else 0)
        scales = {n: t for n, t in block.tensors.items() if n.endswith("input_scale")}
        assert len(scales) == LAYERS
        norm = block.module.get_submodule("input_layernorm")
        largest = max(float(norm(block._read(batch)).abs().max()) for batch in block.batches)
        for part in "qkv":
            stored = block.tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"]
            assert (stored.dtype, stored.shape) == (torch.bfloat16, (1,))
            assert float(stored) == pytest.approx(largest / 448, rel=2**-8)
        weight_scales = {float(block.tensors[f"model.layers.0.self_attn.{p}_proj.weight_scale"]) for p in "qkv"}
        assert len(weight_scales) == 1  # runtimes fuse them, and want one
    assert len(calls) == 3 * LAYERS  # all of the calibration tokens once, and the held-out ones
    assert not list(state.blocks[0]["notes"])


def test_inputs_that_are_only_zeros_get_a_named_fallback(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = tiny("llama", tied=True, layers=1)
    model = open_model(folder, json.loads((folder / "config.json").read_text()))
    read = model.reader

    def zero_norm(prefix: str) -> dict[str, Tensor]:
        return {k: v * (0 if k.endswith("input_layernorm.weight") else 1) for k, v in read(prefix).items()}

    object.__setattr__(model, "reader", zero_norm)
    name = "model.layers.0.self_attn.q_proj"
    spec = WalkSpec(
        schemes={name: PRESETS["W8A8_STATIC"]}, encode=COMPRESSED_TENSORS.encode,
        decode=COMPRESSED_TENSORS.decode, sequential=True, dtype=torch.float32, gram=False,
    )  # fmt: skip
    state = open_state(tmp_path, (tokens(1, 0), tokens(1, 1)), 64, True)
    assert state is not None
    for block in walk(model, (tokens(1, 0), tokens(1, 1)), spec, state, lambda done, total: None):
        step(block, block.schemes, RtnConfig(scheme="W8A8_STATIC"))
    assert "only zeros" in state.blocks[0]["notes"][name][0]


@pytest.mark.usefixtures("verify_here")
def test_a_mixture_computes_what_each_group_says(
    tiny: MakeTiny, text: Path, tmp_path: Path, calls: list[torch.Size]
) -> None:  # fmt: skip
    """Five layouts in one checkpoint; verification compares with plain transformers."""
    overrides = [
        {"match": "self_attn.o_proj", "scheme": "NVFP4A16"}, {"match": "gate_proj", "scheme": "FP8"},
        {"match": "up_proj", "scheme": "FP8"}, {"match": "down_proj", "scheme": "W8A8_STATIC"},
        {"match": "0.self_attn.?_proj", "scheme": "W4A16"},
    ]  # fmt: skip
    recipe = write_recipe(tmp_path, text, method="rtn", scheme="MXFP4A16", overrides=overrides)
    outcome = run(recipe, tiny("llama", tied=False), tmp_path / "out")
    assert outcome.report["verified"]["max_error"] < 1e-5
    assert coded_activations(tmp_path / "out") == {"activations": "float8 tensor static, int8 tensor static"}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert len(settings["config_groups"]) == 5
    calls.clear()
    model = open_artifact(tmp_path / "out")
    assert isinstance(model, CodedModel)
    ((hidden, kwargs),) = model.embed([tokens(1, 3)])
    with torch.no_grad():
        model.block(0)(hidden, **kwargs[0])
    assert len(calls) == 3


# ---- the cache


def cache_recipe(folder: Path, text: Path, **keys: Any) -> str:
    path = folder / "cache.yaml"
    document = {
        "version": 1, "summary": "a test", "steps": [{"method": "rtn", "scheme": "W8A16"}], "kv_cache": "FP8",
        "calibration": {"dataset": f"file:{text}", "samples": 4, "seq_len": 32}, **keys,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.usefixtures("verify_here")
@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "qwen3"])  # sliding windows; one projection; normed keys
def test_a_quantized_cache_is_computed_alike_everywhere(
    family: str, tiny: MakeTiny, text: Path, tmp_path: Path
) -> None:  # fmt: skip
    """By the walk, from disk and by transformers; its scales are where vLLM looks for them."""
    outcome = run(cache_recipe(tmp_path, text), tiny(family, tied=True), tmp_path / "out")
    assert outcome.report["verified"]["max_error"] < 1e-5
    assert outcome.report["verified"]["logit_error"] < 1e-2
    bytes_of = {r["subject"]: r["value"] for r in outcome.report["measurements"] if r["metric"] == "kv_bytes_per_token"}
    assert bytes_of["artifact"] * 2 == bytes_of["base"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config["quantization_config"]["kv_cache_scheme"]
    assert (said["num_bits"], said["type"], said["strategy"], said["dynamic"]) == (8, "float", "tensor", False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith(("k_scale", "v_scale"))}
    assert sorted(scales) == [f"model.layers.{i}.self_attn.{p}_scale" for i in range(2) for p in "kv"]
    assert all((t.dtype, t.shape) == (torch.bfloat16, (1,)) and float(t) > 0 for t in scales.values())
    assert coded_activations(tmp_path / "out") == {"kv_cache": "float8 tensor static"}


@pytest.mark.usefixtures("verify_here")
def test_the_cached_loop_sees_the_quantized_cache(
    tiny: MakeTiny, text: Path, tmp_path: Path
) -> None:  # fmt: skip
    out = run(cache_recipe(tmp_path, text), tiny("llama", tied=True), tmp_path / "out").folder
    runtime = HfRuntime()
    runtime.load(out, threads=1, dtype="float32")
    tokens_1T = tokens(1, 5, 12)
    runtime.prefill(tokens_1T[:, :8])
    stepped = [runtime.extend(tokens_1T[:, i : i + 1]) for i in range(8, 12)]
    logits_1TV = runtime.logits(tokens_1T)
    torch.testing.assert_close(torch.cat(stepped), logits_1TV[0, 8:], rtol=1e-4, atol=1e-4)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (out / "config.json").write_text(json.dumps(config))
    plain = HfRuntime()
    plain.load(out, threads=1, dtype="float32")
    difference = (plain.logits(tokens_1T) - logits_1TV).norm() / logits_1TV.norm()
    assert 1e-4 < difference < 0.2


@pytest.mark.usefixtures("verify_here")
@pytest.mark.parametrize(
    ("scheme", "cache", "bound"), [("W4A16", None, 1e-5), ("FP8", "FP8", 0.02), ("W8A8", None, 0.02)]
)
def test_weights_expanded_once_give_the_same_logits(
    scheme: str, cache: str | None, bound: float, tiny: MakeTiny, text: Path, tmp_path: Path
) -> None:  # fmt: skip
    """What is rounded while running (inputs, the cache) is rounded still; there a tie may fall to the other side."""
    steps = [{"method": "rtn", "scheme": scheme, "group_fallback": [64]}]
    recipe = cache_recipe(tmp_path, text, steps=steps, kv_cache=cache)
    out = run(recipe, tiny("llama", tied=False), tmp_path / "out").folder
    tokens_1T, found = tokens(1, 5, 40), []
    for expand in (False, True):
        runtime = HfRuntime()
        runtime.load(out, threads=1, dtype="float32", expand=expand)
        assert any(hasattr(m, "weight_scale") for m in runtime._model.modules()) is (
            scheme != "W4A16_ASYM" and not expand
        )
        found.append(runtime.logits(tokens_1T))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < bound


def test_the_scales_are_those_of_keys_after_the_rotation(tiny: MakeTiny, tmp_path: Path) -> None:
    folder = tiny("llama", tied=True, layers=1)
    model = open_model(folder, json.loads((folder / "config.json").read_text()))
    name = "model.layers.0.mlp.up_proj"  # keys and values stay those of the original
    spec = WalkSpec(
        schemes={name: PRESETS["W8A16"]}, encode=COMPRESSED_TENSORS.encode, decode=COMPRESSED_TENSORS.decode,
        sequential=True, dtype=torch.float32, gram=False, kv_cache=KV_CACHES["FP8"],
    )  # fmt: skip
    windows = (tokens(3, 0), tokens(1, 1))
    state = open_state(tmp_path, windows, 64, True)
    assert state is not None
    scales: dict[str, Tensor] = {}
    for block in walk(model, windows, spec, state, lambda done, total: None):
        step(block, block.schemes, RtnConfig(scheme="W8A16"))
        scales = block.tensors
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        layer = reference(windows[0], use_cache=True).cache.layers[0]
    for part, states in (("k", layer.keys), ("v", layer.values)):
        found = float(scales[f"model.layers.0.self_attn.{part}_scale"])
        assert found == pytest.approx(float(states.abs().max()) / 448, rel=2**-6)


def test_a_cache_that_cannot_be_quantized_is_refused() -> None:
    head = "version: 1\nsummary: s\nsteps: [{method: rtn, scheme: W8A16}]\nkv_cache: FP8\n"
    linears_of = shapes().linears
    odd = dataclasses.replace(shapes(), linears=tuple((n.replace("k_proj", "kv_a"), s) for n, s in linears_of))
    for model, fmt, words in (
        (shapes(), COMPRESSED_TENSORS, None),
        (shapes(), DENSE, "no words for a quantized cache"),
        (odd, COMPRESSED_TENSORS, "0 of 2 blocks"),
    ):
        plan = make_plan(parse(head, "my.yaml"), model, LLAMA, fmt, names=("tiny", "mine"), calibration=DATA)
        assert plan.statistics == "absmax"
        assert plan.kv_cache == "FP8"
        if words is None:
            assert plan.refusals == ()
        else:
            assert words in plan.refusals[0]
