"""Writes golden/compressed_tensors*.safetensors with the `compressed-tensors` package's own compressors.

For each case it holds the codes, scale and zero point that went in, the tensors that the package made of them,
and the weight that the package reads back. Run it by hand when the package's layout changes:

    python tests/formats/make_golden_compressed_tensors.py
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "compressed_tensors.safetensors"
GOLDEN_EIGHT = GOLDEN.with_stem("compressed_tensors_eight")  # the layouts that are not pack-quantized
BITS = (2, 3, 4, 8)
# By group size; odd on purpose. The package cannot read 4-bit zero points of grouped weights with 8 rows or fewer.
SHAPES: dict[int | None, tuple[int, int]] = {None: (5, 37), 16: (11, 48)}


def case_name(bits: int, symmetric: bool, group_size: int | None) -> str:
    return f"int{bits}-{'sym' if symmetric else 'asym'}-{group_size or 'channel'}"


CASES = {
    case_name(bits, symmetric, group_size): (bits, symmetric, group_size)
    for bits in BITS
    for symmetric in (True, False)
    for group_size in SHAPES
}


def make_case(bits: int, symmetric: bool, group_size: int | None) -> dict[str, Tensor]:
    """What goes in (`codes`, `scale`, `zero`), what the package makes of it, and what it reads back (`weight`)."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    out_features, in_features = SHAPES[group_size]
    groups = in_features // (group_size or in_features)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(low, high, (out_features, in_features), generator=generator, dtype=torch.int8)
    codes[0, 0], codes[-1, -1] = low, high - 1
    zero = torch.randint(low, high, (out_features, groups), generator=generator, dtype=torch.int8)
    if symmetric:
        zero.zero_()
    scale = (torch.rand(out_features, groups, generator=generator) + 0.1).bfloat16()

    repeat = in_features // groups
    shifted = codes.float() - zero.float().repeat_interleave(repeat, 1)
    weight = shifted * scale.float().repeat_interleave(repeat, 1)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=bits,
            symmetric=symmetric,
            strategy="group" if group_size else "channel",
            group_size=group_size,
        ),
    )
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressed = PackedQuantizationCompressor.compress(state, scheme)
    restored = PackedQuantizationCompressor.decompress(compressed, scheme)["weight"]
    assert torch.equal(restored, weight.bfloat16()), "the package chose other codes"
    given = {"codes": codes, "scale": scale.float()} | ({} if symmetric else {"zero": zero})
    return {**given, **compressed, "weight": restored}


def make_all() -> dict[str, Tensor]:
    """Every case's tensors as `case/name`."""
    return {f"{name}/{k}": t for name, case in CASES.items() for k, t in make_case(*case).items()}


# Weights, activations and layout, as the package is told them; (16, 64) in blocks of 8 by 16.
_TOKEN = {"strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float"}
EIGHT: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "int8-channel": ({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, **_TOKEN}, "int-quantized"),
    "int8-tensor-static": (
        {"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor"}, "int-quantized",
    ),
    "fp8-channel": ({**_FP8, "strategy": "channel"}, {**_FP8, **_TOKEN}, "float-quantized"),
    "fp8-tensor-static": ({**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor"}, "float-quantized"),
    "fp8-block": (
        {**_FP8, "strategy": "block", "block_structure": [8, 16]},
        {**_FP8, "strategy": "group", "group_size": 16, "dynamic": True}, "float-quantized",
    ),
    "nvfp4": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, None, "nvfp4-pack-quantized",
    ),
    "mxfp4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None, "mxfp4-pack-quantized"),
}  # fmt: skip
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def make_eight(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Tensor]:
    """As `make_case`: codes as numbers; the scales that went in, a row of the weight each; `weight`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(len(layout) + len(str(weights)))
    shape, bits = (16, 64), weights["num_bits"]
    if weights.get("type") != "float":
        codes = torch.randint(-128, 128, shape, generator=generator).float()
    elif bits == 8:
        codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        codes = codes.masked_fill(codes & 127 == 127, 0).view(torch.float8_e4m3fn).float()  # but NaN
    else:
        sign = torch.randint(0, 2, shape, generator=generator) * -2.0 + 1
        codes = _FP4[torch.randint(0, 8, shape, generator=generator)] * sign + 0.0  # no -0: a weight has none
    rows, columns = weights.get("block_structure") or (1, weights.get("group_size") or shape[1])
    size = (1, 1) if weights["strategy"] == "tensor" else (shape[0] // rows, shape[1] // columns)
    scale = (torch.rand(size, generator=generator) + 0.1).bfloat16().float()
    state: dict[str, Tensor] = {}
    if layout == "nvfp4-pack-quantized":
        scale = (100 * scale).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([96.0])
    if layout == "mxfp4-pack-quantized":
        scale = 2.0 ** torch.randint(-20, 20, size, generator=generator)
    effective = scale / state.get("weight_global_scale", torch.ones(1))
    spread = effective.repeat_interleave(shape[0] // size[0], 0).repeat_interleave(shape[1] // size[1], 1)
    kept = scale if layout.endswith("fp4-pack-quantized") else scale.bfloat16()
    state |= {"weight": codes * spread, "weight_scale": kept.view(1) if weights["strategy"] == "tensor" else kept}
    if inputs and not inputs.get("dynamic"):
        state["input_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    compressor = BaseCompressor.get_value_from_registry(layout)
    compressed = compressor.compress(state, scheme)
    restored = compressor.decompress(compressed, scheme)["weight"]
    assert torch.equal(restored.bfloat16(), (codes * spread).bfloat16()), "the package chose other codes"
    given = effective.expand(shape[0], 1) if size == (1, 1) else effective.repeat_interleave(shape[0] // size[0], 0)
    return {"codes": codes, "scale": given.contiguous(), **compressed, "weight_restored": restored.bfloat16()}


def make_all_eight() -> dict[str, Tensor]:
    """Every case of `EIGHT` as `case/name`."""
    return {f"{name}/{k}": t for name, case in EIGHT.items() for k, t in make_eight(*case).items()}


if __name__ == "__main__":
    from safetensors.torch import save_file

    GOLDEN.parent.mkdir(exist_ok=True)
    about = {"compressed_tensors": version("compressed_tensors")}
    save_file(make_all(), GOLDEN, metadata=about)
    save_file(make_all_eight(), GOLDEN_EIGHT, metadata=about)
