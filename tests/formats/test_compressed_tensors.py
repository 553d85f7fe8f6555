"""pack-quantized: what goes in comes out, bit for bit what the package itself writes and reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from make_golden_compressed_tensors import CASES, GOLDEN, make_all
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.formats import FORMATS
from compress.formats.compressed_tensors import (
    COMPRESSED_TENSORS,
    can_write,
    config,
    decode,
    encode,
    read_config,
)
from compress.methods.rtn import RtnConfig, solve
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import K_QUANTS, PRESETS, SCALE_BYTES, QuantArgs, Scheme, Strategy, misfit, weight_bytes
from compress.tables import resolve

NAMES = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]

HELD = {name: scheme for name, scheme in PRESETS.items() if name not in K_QUANTS}


def scheme_of(bits: int, symmetric: bool, group_size: int | None) -> Scheme:
    strategy: Strategy = "group" if group_size else "channel"
    return Scheme(weights=QuantArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size))


def coded_weight(shape: tuple[int, int], scheme: Scheme, seed: int = 0) -> QuantizedWeight:
    w_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3
    return solve(w_OI, None, scheme.weights, RtnConfig(scheme=scheme))


def assert_round_trip(shape: tuple[int, int], scheme: Scheme, folder: Path) -> None:
    coded = coded_weight(shape, scheme)
    tensors = encode("m", coded, scheme)
    assert {n.removeprefix("m.") for n in tensors} <= set(COMPRESSED_TENSORS.parts)
    assert ("m.weight_zero_point" in tensors) == (not scheme.weights.symmetric)
    inputs = SCALE_BYTES if scheme.static_inputs else 0  # measured by the walk, which this test has not
    assert sum(t.nbytes for t in tensors.values()) + inputs == weight_bytes(scheme, shape)
    save_file(tensors, folder / "m.safetensors")
    loaded = load_file(folder / "m.safetensors")
    assert torch.equal(decode("m", loaded, scheme), dequantize(coded))


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("shape", [(32, 128), (5, 256), (1, 384), (256, 128)])
def test_every_preset_comes_back(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    assert can_write(PRESETS[name]) is None
    if misfit(PRESETS[name], shape):
        pytest.skip("a block is higher than the weight")
    assert_round_trip(shape, PRESETS[name], tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "group_size"), [((5, 37), None), ((33, 1), None), ((3, 95), None), ((7, 72), 24), ((11, 40), 8)]
)
def test_odd_widths_come_back(
    bits: int, symmetric: bool, shape: tuple[int, int], group_size: int | None, tmp_path: Path
) -> None:
    assert_round_trip(shape, scheme_of(bits, symmetric, group_size), tmp_path)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.mark.parametrize("case", CASES)
def test_encodes_as_the_package_does(case: str, golden: dict[str, Tensor]) -> None:
    scheme = scheme_of(*CASES[case])
    zero = golden.get(f"{case}/zero")
    coded = QuantizedWeight(golden[f"{case}/codes"], golden[f"{case}/scale"], zero)
    tensors = encode("m", coded, scheme)
    expected = {
        f"m.{name.removeprefix(case + '/')}": tensor
        for name, tensor in golden.items()
        if name.startswith(f"{case}/weight_")
    }
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_decodes_as_the_package_does(case: str, golden: dict[str, Tensor]) -> None:
    tensors = {n.replace(f"{case}/", "m."): t for n, t in golden.items() if n.startswith(f"{case}/weight_")}
    w_OI = decode("m", tensors, scheme_of(*CASES[case]))
    assert w_OI.dtype == torch.float32
    assert torch.equal(w_OI.bfloat16(), golden[f"{case}/weight"])  # the package multiplies in bfloat16


def test_the_installed_package_still_writes_the_golden_file(golden: dict[str, Tensor]) -> None:
    made = make_all()
    assert made.keys() == golden.keys()
    assert [n for n in made if not torch.equal(made[n], golden[n])] == []
    assert GOLDEN.stat().st_size < 50_000


def test_k_quants_have_no_words_here() -> None:
    assert {str(can_write(scheme)) for scheme in K_QUANTS.values()} == {"it has no words for super-groups (K-quants)"}


def mixed_schemes() -> dict[str, Scheme]:
    return dict(zip(NAMES, [PRESETS["W4A16"], PRESETS["W8A16"]] * 2, strict=True))


@pytest.mark.parametrize("name", HELD)
def test_one_scheme_is_said_and_read(name: str) -> None:
    schemes = dict.fromkeys(NAMES, PRESETS[name])
    settings = config(schemes, ["lm_head", "model.router"])
    assert read_config(settings, [*NAMES, "lm_head", "model.router"]) == schemes
    assert settings["ignore"] == ["lm_head", "model.router"]
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_many_schemes_are_said_and_read() -> None:
    schemes = {f"model.layers.0.{name.lower()}": scheme for name, scheme in HELD.items()}
    settings = config(schemes, ["lm_head"])
    assert len(settings["config_groups"]) == len(HELD)
    assert read_config(settings, [*schemes, "lm_head"]) == schemes
    schemes = mixed_schemes()
    settings = config(schemes, [])
    assert len(settings["config_groups"]) == 2
    assert read_config(settings, NAMES) == schemes


def tiny_model() -> torch.nn.Module:
    """A module with linear layers of the test's names, and one that is not quantized."""
    model = torch.nn.Module()
    for name in [*NAMES, "lm_head"]:
        *folders, leaf = name.split(".")
        parent = model
        for folder in folders:
            if not hasattr(parent, folder):
                parent.add_module(folder, torch.nn.Module())
            parent = parent.get_submodule(folder)
        parent.add_module(leaf, torch.nn.Linear(128, 128))
    return model


@pytest.mark.parametrize("schemes", [dict.fromkeys(NAMES, PRESETS["W4A16_ASYM"]), mixed_schemes()])
def test_the_package_gives_every_layer_the_scheme_that_we_said(schemes: dict[str, Scheme]) -> None:
    settings = QuantizationConfig.model_validate(config(schemes, ["lm_head"]))
    assert settings.format == "pack-quantized"
    model = tiny_model()
    apply_quantization_config(model, settings, show_progress=False)
    assert not hasattr(model.get_submodule("lm_head"), "quantization_scheme")
    for name, scheme in schemes.items():
        applied: Any = model.get_submodule(name).quantization_scheme
        said = scheme.weights.model_dump()
        assert {k: getattr(applied.weights, k) for k in said} == said
        assert applied.input_activations is None


def test_what_the_format_cannot_hold_is_refused() -> None:
    assert resolve(FORMATS, "compressed-tensors", kind="format") is COMPRESSED_TENSORS
    assert "tensor" in str(can_write(Scheme(weights=QuantArgs(num_bits=8, strategy="tensor"))))
