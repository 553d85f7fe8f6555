"""Writes golden/compressed_tensors.safetensors with the `compressed-tensors` package's own compressor.

For each case it holds the codes, scale and zero point that went in, the tensors that the package made of them,
and the weight that the package reads back. Run it by hand when the package's layout changes:

    python tests/formats/make_golden_compressed_tensors.py
"""

from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden" / "compressed_tensors.safetensors"
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


if __name__ == "__main__":
    from safetensors.torch import save_file

    GOLDEN.parent.mkdir(exist_ok=True)
    save_file(make_all(), GOLDEN, metadata={"compressed_tensors": version("compressed_tensors")})
