"""AutoGPTQ's and AutoAWQ's layouts: every code survives, naive readers agree, and what they cannot hold is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.errors import CompressError
from compress.formats import awq, fp8, gptq
from compress.formats.base import Format
from compress.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.methods.gptq import GptqConfig, solve
from compress.methods.rounding import round_to_nearest
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import PRESETS, QuantArgs, Scheme


def coded(args: QuantArgs, rows: int = 64, columns: int = 128, seed: int = 0) -> QuantizedWeight:
    w_OI = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 50
    w_OI[:, :32] = w_OI[:, :32].abs()  # a group without a negative value wants the smallest zero point
    w_OI[3] = 0
    return round_to_nearest(w_OI, None, args, scale_search=False)


def bits_of(words: Tensor, num_bits: int, count: int) -> list[int]:
    """Codes from a string of 32-bit words, bit by bit."""
    string = [(int(word) >> bit) & 1 for word in words.tolist() for bit in range(32)]
    return [sum(string[i * num_bits + b] << b for b in range(num_bits)) for i in range(count)]


def naive_gptq(tensors: dict[str, Tensor], num_bits: int) -> Tensor:
    """(q − (z + 1)) s, element by element, float64."""
    qweight, qzeros, scales, g_idx = (tensors[f"l.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
    columns, rows = len(g_idx), scales.shape[1]
    zero_GO = [bits_of(words, num_bits, rows) for words in qzeros]
    w_OI = torch.empty(rows, columns, dtype=torch.float64)
    for o in range(rows):
        for i, q in enumerate(bits_of(qweight[:, o], num_bits, columns)):
            g = int(g_idx[i])
            w_OI[o, i] = (q - (zero_GO[g][o] + 1)) * float(scales[g, o])
    return w_OI


def naive_awq(tensors: dict[str, Tensor], group: int) -> Tensor:
    """(q − z) s with AutoAWQ's order of eight codes in a word, element by element, float64."""
    qweight, qzeros, scales = (tensors[f"l.{part}"] for part in ("qweight", "qzeros", "scales"))
    place = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # where the code of an output stands
    columns, rows = qweight.shape[0], scales.shape[1]

    def code(words: Tensor, o: int) -> int:
        return (int(words[o // 8]) >> (4 * place[o % 8])) & 15

    w_OI = torch.empty(rows, columns, dtype=torch.float64)
    for o in range(rows):
        for i in range(columns):
            w_OI[o, i] = (code(qweight[i], o) - code(qzeros[i // group], o)) * float(scales[i // group, o])
    return w_OI


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
def test_gptq_holds_every_code(num_bits: int, symmetric: bool, group: int | None) -> None:
    strategy: Any = "group" if group else "channel"
    args = QuantArgs(num_bits=num_bits, symmetric=symmetric, strategy=strategy, group_size=group)
    scheme, weight = Scheme(weights=args), coded(args, rows=32)
    tensors = gptq.encode("l", weight, scheme)
    found = gptq.read("l", tensors, scheme)
    assert torch.equal(found.q_OI, weight.q_OI)
    assert torch.equal(found.scale, weight.scale.clamp_min(2.0**-24))  # bfloat16 scales are exact in float16
    assert (found.zero is None) == symmetric
    if weight.zero is not None and found.zero is not None:
        assert torch.equal(found.zero, weight.zero)
    decoded_OI = gptq.decode("l", tensors, scheme)
    torch.testing.assert_close(decoded_OI, dequantize(weight))
    torch.testing.assert_close(naive_gptq(tensors, num_bits).float(), decoded_OI)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == gptq.weight_bytes(scheme, (32, 128))


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_holds_every_code(symmetric: bool) -> None:
    args = QuantArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=32)
    scheme, weight = Scheme(weights=args), coded(args, rows=32)
    tensors = awq.encode("l", weight, scheme)
    decoded_OI = awq.decode("l", tensors, scheme)
    torch.testing.assert_close(decoded_OI, dequantize(weight))
    torch.testing.assert_close(naive_awq(tensors, 32).float(), decoded_OI)
    assert torch.equal(awq.read("l", tensors, scheme).q_OI, weight.q_OI)
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == awq.weight_bytes(scheme, (32, 128))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), rows=st.integers(1, 4), words=st.integers(1, 5))
def test_awq_packing_is_undone(seed: int, rows: int, words: int) -> None:
    code = torch.randint(0, 16, (rows, 8 * words), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(awq.unpack(awq.pack(code)), code)


def test_act_order_by_group_says_every_columns_group() -> None:
    generator = torch.Generator().manual_seed(1)
    x_NI = torch.randn(256, 64, generator=generator) * torch.rand(64, generator=generator) * 3
    w_OI, gram_II = torch.randn(32, 64, generator=generator) / 20, x_NI.t() @ x_NI / 256
    scheme = PRESETS["W4A16"].with_group_size(16).reordered()
    weight = solve(w_OI, gram_II, scheme.weights, GptqConfig(scheme="W4A16", actorder="group"))
    assert weight.g_idx_I is not None
    assert weight.g_idx_I.bincount().tolist() == [16] * 4
    largest_first = gram_II.diagonal().argsort(descending=True, stable=True)
    assert weight.g_idx_I[largest_first].tolist() == [g for g in range(4) for _ in range(16)]
    tensors = gptq.encode("l", weight, scheme)
    torch.testing.assert_close(gptq.decode("l", tensors, scheme), dequantize(weight))
    torch.testing.assert_close(naive_gptq(tensors, 4).float(), dequantize(weight))
    delta_OI = dequantize(weight) - w_OI
    nearest_OI = dequantize(round_to_nearest(w_OI, None, PRESETS["W4A16"].with_group_size(16).weights, False)) - w_OI

    def loss(d_OI: Tensor) -> float:
        return float(((d_OI @ gram_II) * d_OI).sum())

    assert loss(delta_OI) < 0.7 * loss(nearest_OI)


@pytest.mark.parametrize("fmt", [gptq.GPTQ, awq.AWQ], ids=lambda fmt: fmt.name)
def test_the_config_is_read_back(fmt: Format) -> None:
    names = ["model.layers.0.q_proj", "model.layers.0.k_proj", "lm_head"]
    scheme = PRESETS["W4A16_ASYM"]
    written = fmt.config({names[0]: scheme}, names[1:], None)
    assert written is not None
    assert written["quant_method"] == fmt.name
    assert fmt.read_config(written, names) == {names[0]: scheme}
    assert fmt.can_mix([scheme, PRESETS["W4A16"]]) is not None


def test_a_gptq_config_says_symmetry_order_and_channels() -> None:
    for scheme in (PRESETS["W3A16"], PRESETS["W4A16"].reordered(), PRESETS["W8A16"]):
        written = gptq.config({"a.b": scheme}, [])
        assert gptq.read_config(written, ["a.b"]) == {"a.b": scheme}


def bad(read: Callable[..., Any], **said: Any) -> str:
    with pytest.raises(CompressError) as error:
        read({"bits": 4, "group_size": 128, **said}, ["a.b"])
    return error.value.what


def test_other_versions_are_refused() -> None:
    assert "gptq_v2" in bad(gptq.read_config, checkpoint_format="gptq_v2")
    assert "different widths" in bad(gptq.read_config, dynamic={"+:.*down.*": {"bits": 8}})
    assert "gemv" in bad(awq.read_config, version="gemv")
    assert "valid integer" in bad(gptq.read_config, bits=None)


@pytest.mark.parametrize(("fmt", "preset", "reason"), [
    (gptq.GPTQ, "W8A8", "activations"), (gptq.GPTQ, "FP8_DYNAMIC", "activations"), (gptq.GPTQ, "NVFP4A16", "integers"),
    (awq.AWQ, "W3A16", "4-bit"), (awq.AWQ, "W8A16", "groups"), (awq.AWQ, "W8A8", "activations"),
])  # fmt: skip
def test_what_they_cannot_hold(fmt: Format, preset: str, reason: str) -> None:
    assert reason in str(fmt.can_write(PRESETS[preset], ""))
    assert fmt.can_write(PRESETS["W4A16"], "") is None
    assert "48" in str(fmt.misfit((48, 64)))
    assert fmt.misfit((64, 32)) is None


def test_zero_points_that_version_1_cannot_say() -> None:
    args = QuantArgs(num_bits=8, symmetric=False, strategy="group", group_size=32)
    scheme, weight = Scheme(weights=args), coded(args, rows=32)
    assert weight.zero is not None
    assert int(weight.zero.min()) > -128  # ranges reach a step below zero
    zero_OG = weight.zero.clone()
    zero_OG[0, 0] = -128
    with pytest.raises(CompressError, match="smallest code"):
        gptq.encode("l", dataclasses.replace(weight, zero=zero_OG), scheme)
    tensors = gptq.encode("l", weight, scheme)
    tensors["l.qzeros"] = torch.full_like(tensors["l.qzeros"], -1)
    with pytest.raises(CompressError, match="beyond the codes"):
        gptq.read("l", tensors, scheme)


def test_groups_that_do_not_divide_are_not_read() -> None:
    args = QuantArgs(num_bits=4, strategy="group", group_size=32)
    scheme = Scheme(weights=args)
    tensors = gptq.encode("l", coded(args, rows=32), scheme)
    with pytest.raises(CompressError, match="does not divide"):
        gptq.read("l", tensors, PRESETS["W4A16"].with_group_size(48))


def test_layers_left_out_are_read_in_the_words_of_both_tools() -> None:
    names = ["m.0.q_proj", "m.0.down_proj", "lm_head"]
    said = {"bits": 4, "group_size": 128}
    assert list(gptq.read_config({**said, "dynamic": {r"-:^m\.0\.down_proj$": {}}}, names)) == ["m.0.q_proj"]
    assert list(gptq.read_config({**said, "modules_in_block_to_quantize": [["q_proj"]]}, names)) == ["m.0.q_proj"]
    assert "head" in bad(gptq.read_config, lm_head=True)


def test_fp8_blocks_round_trip() -> None:
    scheme = PRESETS["FP8_BLOCK"]
    w_OI = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9, 384)
    weight = round_to_nearest(w_OI, None, scheme.weights, scale_search=False)
    tensors = fp8.encode("l", weight, scheme)
    assert tensors["l.weight_scale_inv"].shape == (2, 3)
    decoded_OI = fp8.decode("l", tensors, scheme)
    assert torch.equal(decoded_OI, dequantize(weight))
    for o, i in ((0, 0), (200, 130), (255, 383)):  # by hand: the code times its block's scale
        code, scale = tensors["l.weight"][o, i].float(), tensors["l.weight_scale_inv"][o // 128, i // 128]
        assert decoded_OI[o, i] == code * scale
    assert float((decoded_OI - w_OI).norm() / w_OI.norm()) < 0.04
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == fp8.weight_bytes(scheme, (256, 384))
    written = fp8.config({"m.a": scheme}, ["m.b", "lm_head"])
    assert fp8.read_config(written, ["m.a", "m.b", "lm_head"]) == {"m.a": scheme}
    assert fp8.can_write(PRESETS["FP8"]) == "it holds FP8_BLOCK only"
    assert "960" in str(fp8.misfit((256, 960)))
    with pytest.raises(CompressError, match="edge"):
        fp8.read("l", {"l.weight": torch.zeros(256, 960), "l.weight_scale_inv": torch.ones(2, 8)}, scheme)
    with pytest.raises(CompressError, match="128"):
        fp8.read_config({**written, "activation_scheme": "static"}, [])


@pytest.mark.parametrize(
    ("fmt", "kinds", "read"),
    [
        (COMPRESSED_TENSORS, ["W4A16"], True),
        (COMPRESSED_TENSORS, ["W8A16", "W8A8", "NVFP4A16"], True),
        (COMPRESSED_TENSORS, ["W3A16"], False),
        (COMPRESSED_TENSORS, ["W4A16", "W2A16"], False),
        (gptq.GPTQ, ["W3A16"], True),
        (gptq.GPTQ, ["W4A16_ASYM"], False),
        (awq.AWQ, ["W4A16_ASYM"], True),
    ],
)  # fmt: skip
def test_a_loader_is_named_only_where_it_reads_the_scheme(fmt: Format, kinds: list[str], read: bool) -> None:
    loaders = fmt.read_by({PRESETS[kind] for kind in kinds})
    assert ("vLLM" in loaders) is ("SGLang" in loaders) is read
    assert loaders[0] == fmt.loaders[0]
    assert "vLLM" not in gptq.GPTQ.read_by({PRESETS["W4A16"].reordered()})
    odd = PRESETS["W4A16"].with_group_size(16)
    assert ("vLLM" in fmt.read_by({odd})) is (fmt is not COMPRESSED_TENSORS)
