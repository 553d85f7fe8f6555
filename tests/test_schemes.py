"""What number formats exist, what is refused and why, and what they cost, by hand."""

from typing import Any

import pytest
from pydantic import ValidationError

from compress.schemes import PRESETS, QuantArgs, Scheme, misfit, scale_count, weight_bytes

INT8: dict[str, Any] = {"num_bits": 8}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True}
NOT_A_TENSOR: dict[str, tuple[dict[str, Any], str]] = {
    "group without a size": ({**INT8, "strategy": "group"}, "`group_size` goes with"),
    "a size without groups": ({**INT8, "group_size": 32}, "`group_size` goes with"),
    "block without structure": ({**FP8, "strategy": "block"}, "`block_structure"),
    "structure without block": ({**FP8, "block_structure": (128, 128)}, "`block_structure"),
    "empty blocks": ({**FP8, "strategy": "block", "block_structure": (0, 128)}, "at least 1"),
    "integer blocks": ({**INT8, "strategy": "block", "block_structure": (128, 128)}, "is for floats"),
    "integer tensor groups": ({**INT8, "strategy": "tensor_group", "group_size": 16}, "is for floats"),
    "static tokens": ({**INT8, "strategy": "token"}, "dynamic: true"),
    "6-bit floats": ({"num_bits": 6, "type": "float"}, "8 bits .E4M3. or 4"),
    "asymmetric floats": ({**FP8, "symmetric": False}, "no zero point"),
    "4-bit floats per channel": ({"num_bits": 4, "type": "float"}, "NVFP4.*MXFP4"),
    "4-bit floats in groups of 64": (
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64}, "NVFP4.*MXFP4",
    ),
    "8-bit floats in tensor groups": ({**FP8, "strategy": "tensor_group", "group_size": 16}, "4-bit floats"),
}  # fmt: skip
NOT_A_SCHEME: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "dynamic weights": ({**INT8, "strategy": "tensor", "dynamic": True}, None, "not for weights"),
    "weights per token": ({**INT8, **TOKEN}, None, "not for weights"),
    "8-bit float weights in groups": ({**FP8, "strategy": "group", "group_size": 32}, None, "not per group"),
    "4-bit activations": (INT8, {"num_bits": 4, **TOKEN}, "8 bits"),
    "activations with a zero point": (INT8, {**INT8, **TOKEN, "symmetric": False}, "no zero point"),
    "activations per batch": (INT8, {**INT8, "strategy": "tensor", "dynamic": True}, "what else is in the batch"),
    "activations per channel": (INT8, INT8, "per token"),
    "integers times floats": (INT8, {**FP8, **TOKEN}, "same type"),
    "4-bit weights, 8-bit activations": ({"num_bits": 4}, {**INT8, **TOKEN}, "symmetric 8-bit weights"),
    "weights with a zero point": ({**INT8, "symmetric": False}, {**INT8, **TOKEN}, "symmetric 8-bit weights"),
    "weights in groups": ({**INT8, "strategy": "group", "group_size": 128}, {**INT8, **TOKEN}, "tensor or channel"),
    "groups of activations without blocks": (
        FP8, {**FP8, "strategy": "group", "group_size": 128, "dynamic": True}, "in blocks go with",
    ),
    "blocks and other groups": (
        {**FP8, "strategy": "block", "block_structure": (128, 128)},
        {**FP8, "strategy": "group", "group_size": 64, "dynamic": True}, "block's columns",
    ),
    "blocks and tokens": ({**FP8, "strategy": "block", "block_structure": (128, 128)}, {**FP8, **TOKEN}, "in blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_A_TENSOR)
def test_a_coding_that_does_not_exist(case: str) -> None:
    keys, words = NOT_A_TENSOR[case]
    with pytest.raises(ValidationError, match=words):
        QuantArgs(**keys)


@pytest.mark.parametrize("case", NOT_A_SCHEME)
def test_a_scheme_that_nothing_runs(case: str) -> None:
    weights, inputs, words = NOT_A_SCHEME[case]
    with pytest.raises(ValidationError, match=words):
        Scheme.model_validate({"weights": weights, "input_activations": inputs})


@pytest.mark.parametrize(
    ("name", "text", "scales", "size"),
    [
        ("W8A8", "int8 sym channel + act int8 token", 256, 256 * 384 + 2 * 256),
        ("W8A8_STATIC", "int8 sym channel + act int8 tensor static", 256, 256 * 384 + 2 * 256 + 2),
        ("FP8", "float8 tensor + act float8 tensor static", 1, 256 * 384 + 2 + 2),
        ("FP8_DYNAMIC", "float8 channel + act float8 token", 256, 256 * 384 + 2 * 256),
        ("FP8_BLOCK", "float8 block 128×128 + act float8 group 128", 6, 256 * 384 + 2 * 6),
        ("NVFP4A16", "float4 tensor_group 16", 256 * 24, 256 * 192 + 256 * 24 + 4),
        ("MXFP4A16", "float4 group 32", 256 * 12, 256 * 192 + 256 * 12),
        ("W8A16", "int8 sym channel", 256, 256 * 384 + 2 * 256 + 16),
    ],
)
def test_names_scales_and_bytes_by_hand(name: str, text: str, scales: int, size: int) -> None:
    scheme = PRESETS[name]
    assert scheme.text == text
    assert scale_count(scheme.weights, (256, 384)) == scales
    assert weight_bytes(scheme, (256, 384)) == size
    assert misfit(scheme, (256, 384)) is None


def test_what_does_not_divide_is_named() -> None:
    assert misfit(PRESETS["FP8_BLOCK"], (192, 576)) == (
        "block_structure [128, 128] does not divide its 192 rows and 576 columns"
    )
    assert misfit(PRESETS["NVFP4A16"], (8, 72)) == "group_size 16 does not divide its input width 72"
    assert misfit(PRESETS["FP8_DYNAMIC"], (7, 13)) is None


def test_only_plain_integers_are_cut_into_other_groups() -> None:
    assert [name for name, scheme in PRESETS.items() if scheme.regroups] == [
        "W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W8A16",
    ]  # fmt: skip
    assert PRESETS["W8A16"].with_group_size(64).text == "int8 sym group 64"
    with pytest.raises(AssertionError):
        PRESETS["NVFP4A16"].with_group_size(32)
