"""The layouts beside pack-quantized: bit for bit what the package writes and reads, and rounds of activations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from make_golden_compressed_tensors import EIGHT, GOLDEN_EIGHT, make_all_eight
from safetensors.torch import load_file
from torch import Tensor

from compress.errors import CompressError
from compress.formats.compressed_tensors import can_mix, config, decode, encode, layout, read_config
from compress.numerics import QuantizedWeight, code_dtype, quantize_activations, static_scale
from compress.schemes import K_QUANTS, PRESETS, Scheme
from tests.formats.test_compressed_tensors import NAMES, tiny_model

OURS_ALONE = {"W8A16", "W8A8_STATIC"}  # per channel here; the package has no name for it
HELD = {name: scheme for name, scheme in PRESETS.items() if name not in K_QUANTS}


def scheme_of(case: str) -> Scheme:
    weights, inputs, _ = EIGHT[case]
    return Scheme.model_validate({"weights": weights, "input_activations": inputs})


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN_EIGHT)


def stored(golden: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    """The package's tensors of a case."""
    found = {name.removeprefix(case + "/"): t for name, t in golden.items() if name.startswith(case + "/")}
    return {f"m.{part}": t for part, t in found.items() if part not in ("codes", "scale", "weight_restored")}


@pytest.mark.parametrize("case", EIGHT)
def test_encodes_as_the_package_does(case: str, golden: dict[str, Tensor]) -> None:
    scheme, expected = scheme_of(case), stored(golden, case)
    scale = golden[f"{case}/scale"]
    coded = QuantizedWeight(
        golden[f"{case}/codes"].to(code_dtype(scheme.weights)),
        scale[:1] if scheme.weights.strategy == "tensor" else scale,
        None,
        global_scale=expected.get("m.weight_global_scale"),
        input_scale=expected.get("m.input_scale"),
    )
    tensors = encode("m", coded, scheme)
    assert layout(scheme) == EIGHT[case][2]
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("case", EIGHT)
def test_decodes_as_the_package_does(case: str, golden: dict[str, Tensor]) -> None:
    w_OI = decode("m", stored(golden, case), scheme_of(case))
    assert w_OI.dtype == torch.float32
    assert torch.equal(w_OI.bfloat16(), golden[f"{case}/weight_restored"])


def test_the_installed_package_still_writes_the_golden_file(golden: dict[str, Tensor]) -> None:
    made = make_all_eight()
    assert made.keys() == golden.keys()
    assert [n for n in made if not torch.equal(made[n].view(torch.uint8), golden[n].view(torch.uint8))] == []
    assert GOLDEN_EIGHT.stat().st_size < 100_000


@pytest.mark.parametrize("name", sorted(set(HELD) - OURS_ALONE))
def test_presets_mean_what_the_packages_do(name: str) -> None:
    theirs: Any = preset_name_to_scheme(name, ["Linear"])
    for part in ("weights", "input_activations"):
        ours, other = getattr(PRESETS[name], part), getattr(theirs, part)
        assert (ours is None) == (other is None)
        if ours is not None:
            said = {k: v for k, v in ours.model_dump(mode="json").items() if v is not None}
            assert {k: getattr(other, k) for k in said} == said


@pytest.mark.parametrize("name", HELD)
def test_the_package_understands_what_is_said(name: str) -> None:
    settings = QuantizationConfig.model_validate(config(dict.fromkeys(NAMES, PRESETS[name]), ["lm_head"]))
    model = tiny_model()
    apply_quantization_config(model, settings, show_progress=False)
    applied: Any = model.get_submodule(NAMES[0]).quantization_scheme
    assert applied.format == layout(PRESETS[name]) == settings.format
    scale_dtype = {"nvfp4-pack-quantized": torch.float8_e4m3fn, "mxfp4-pack-quantized": torch.uint8}
    assert applied.weights.scale_dtype == scale_dtype.get(settings.format)
    for part in ("weights", "input_activations"):
        ours, other = getattr(PRESETS[name], part), getattr(applied, part)
        said = {k: v for k, v in ours.model_dump(mode="json").items() if v is not None} if ours else {}
        assert {k: getattr(other, k) for k in said} == said


def test_a_mixture_names_each_layers_layout() -> None:
    schemes = {f"{n}.{p}": s for n, (p, s) in zip(NAMES * 4, HELD.items(), strict=False) if s.weights.symmetric}
    settings = config(schemes, ["lm_head"])
    assert settings["format"] == "mixed-precision"
    assert {g["format"] for g in settings["config_groups"].values()} == {layout(s) for s in schemes.values()}
    assert read_config(settings, [*schemes, "lm_head"]) == schemes
    assert can_mix(list(schemes.values())) is None
    assert "asymmetric" in str(can_mix([PRESETS["W4A16_ASYM"], PRESETS["W8A8"]]))
    assert can_mix([PRESETS["W4A16_ASYM"]]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}},
        {"weights": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}},
        {"format": "naive-quantized"},
        {"format": "pack-quantized"},
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any]) -> None:
    settings = config(dict.fromkeys(NAMES, PRESETS["FP8_DYNAMIC"]), [])
    settings["config_groups"]["group_0"] |= change
    with pytest.raises(CompressError, match="is not read"):
        read_config(settings, NAMES)


@pytest.mark.parametrize("name", [n for n, s in PRESETS.items() if s.input_activations])
def test_activations_are_rounded_as_the_package_does(name: str) -> None:
    args: Any = PRESETS[name].input_activations
    x_BTI = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(0))
    x_BTI[0, 1] *= 1e3
    scale = None if args.dynamic else static_scale(x_BTI[0, 0].abs().max(), args)
    module: Any = torch.nn.Module()
    module.quantization_status = QuantizationStatus.FROZEN
    module.input_scale = scale
    said = args.model_dump(mode="json")
    theirs = forward_quantize(module, x_BTI, "input", QuantizationArgs(**said))
    torch.testing.assert_close(quantize_activations(x_BTI, args, scale), theirs, rtol=1e-6, atol=0)


def test_golden_files_are_few(request: pytest.FixtureRequest) -> None:
    folder = Path(str(request.path)).parent / "golden"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 500_000
