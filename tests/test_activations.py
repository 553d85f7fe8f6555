"""Quantized inputs: off until switched on, in every pass of the walk from the moment a weight is set, and from disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import activations
from compress.activations import QuantizedInput, wire_inputs
from compress.artifact import CodedModel, coded_inputs, open_artifact
from compress.calibration.walk import WalkSpec, open_state, walk
from compress.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.methods.rtn import RtnConfig, step
from compress.models.load import linears, open_model
from compress.numerics import quantize_activations
from compress.schemes import PRESETS
from tests.conftest import MakeTiny
from tests.test_pipeline import run, text, verify_here, write_recipe  # noqa: F401  # fixtures

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
        block.rerun()
        assert len(calls) == 2 * LAYERS
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
    assert len(calls) == 3 * LAYERS  # and the held-out tokens
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
    tiny: MakeTiny, text: Path, tmp_path: Path, calls: list[torch.Size]  # noqa: F811
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
    assert coded_inputs(tmp_path / "out") == "float8 tensor static, int8 tensor static"
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "mixed-precision"
    assert len(settings["config_groups"]) == 5
    calls.clear()
    model = open_artifact(tmp_path / "out")
    assert isinstance(model, CodedModel)
    ((hidden, kwargs),) = model.embed(tokens(1, 3), 1)
    with torch.no_grad():
        model.block(0)(hidden, **kwargs[0])
    assert len(calls) == 3
