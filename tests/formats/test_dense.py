"""Dense: the coded values in bfloat16, and not a word of quantization."""

import pytest
import torch

from compress.formats import FORMATS
from compress.formats.dense import DENSE, can_write, decode, encode, read_config
from compress.methods.rtn import RtnConfig, solve
from compress.numerics import dequantize
from compress.schemes import PRESETS, QuantArgs, Scheme
from compress.tables import resolve


@pytest.mark.parametrize("name", [name for name, scheme in PRESETS.items() if scheme.input_activations is None])
def test_every_preset_comes_back_to_bfloat16(name: str) -> None:
    scheme = PRESETS[name]
    assert can_write(scheme) is None
    w_OI = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    coded = solve(w_OI, None, scheme.weights, RtnConfig(scheme=scheme))
    tensors = encode("m", coded, scheme)
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {"m.weight": (torch.bfloat16, (5, 256))}
    values_OI = decode("m", tensors, scheme)
    assert values_OI.dtype == torch.float32
    assert torch.equal(values_OI, dequantize(coded).bfloat16().float())
    levels = 2**scheme.weights.num_bits
    groups = values_OI.view(-1, scheme.weights.group_size or 256)
    assert max(len(group.unique()) for group in groups) <= levels  # E2M1 has two zeros


def test_says_nothing_of_quantization() -> None:
    assert resolve(FORMATS, "dense", kind="format") is DENSE
    assert DENSE.config({"m": PRESETS["W4A16"]}, ["lm_head"]) is None
    assert read_config({}, ["m"]) == {}
    assert not DENSE.packs
    assert DENSE.parts == ("weight",)


def test_holds_any_weights_but_no_quantized_activations() -> None:
    weights = QuantArgs(num_bits=8, strategy="tensor")
    assert can_write(Scheme(weights=weights)) is None
    activations = QuantArgs(num_bits=8, strategy="token", dynamic=True)
    assert "activations" in str(can_write(Scheme(weights=weights, input_activations=activations)))
