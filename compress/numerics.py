"""The arithmetic of quantization: parameters, rounding, packing. Pure functions of tensors.

Codes are signed integers `q` in [-2^(b-1), 2^(b-1)-1] and a value is `(q - zero) * scale`, as in
compressed-tensors; other formats shift into their own ranges when they are written. Scales are rounded to
bfloat16, the precision in which they are stored, *before* the codes are chosen, so that what a solver
minimises is what a loader will see.

Left out: float codes (FP8, FP4), whose grids are not evenly spaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.schemes import QuantArgs

_TINY = 2.0**-100  # a group of zeros gets this scale: finite, positive, and its codes are zero


@dataclass(frozen=True)
class QuantizedWeight:
    """A coded weight.

    Attributes:
        q_OI: int8 codes [O, I].
        scale: float32 [O, G] (G = 1 for channel; [1, 1] for tensor), each a bfloat16 value.
        zero: int8 [O, G] zero points in the codes' range, None when symmetric.
        loss: the solver's own objective, for the record; not comparable between methods.
        notes: named numerical fallbacks that were taken, for the report.
    """

    q_OI: Tensor
    scale: Tensor
    zero: Tensor | None
    loss: float = 0.0
    notes: tuple[str, ...] = ()


def round_scale(scale: Tensor) -> Tensor:
    """The stored precision of a scale (bfloat16), as float32; zeros become a tiny positive number."""
    return scale.clamp_min(_TINY).bfloat16().float()


def qparams(low: Tensor, high: Tensor, args: QuantArgs) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that map [low, high] onto the codes.

    Symmetric: the scale is max(|low|, |high|) / ((2^b - 1) / 2). Asymmetric: the range is stretched to hold
    zero, so that zero is exact.

    Args:
        low, high: float32 tensors of one shape, the ends of each range.
    Returns:
        scale float32 and zero int8 (None when symmetric), of that shape.
    """
    if args.symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / ((args.qmax - args.qmin) / 2)
        return round_scale(scale), None
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = round_scale((high - low) / (args.qmax - args.qmin))
    zero = (args.qmin - low / scale).round().clamp(args.qmin, args.qmax)
    return scale, zero.to(torch.int8)


def quantize(w: Tensor, scale: Tensor, zero: Tensor | float, args: QuantArgs) -> Tensor:
    """Nearest codes of `w` as float32; `scale` and `zero` broadcast against it."""
    return w.div(scale).add_(zero).round_().clamp_(args.qmin, args.qmax)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """float32 [O, I] values of a coded weight."""
    out_features, in_features = weight.q_OI.shape
    groups = weight.scale.shape[-1]
    q_OGi = weight.q_OI.float().view(out_features, groups, in_features // groups)
    if weight.zero is not None:
        q_OGi = q_OGi - weight.zero.float().unsqueeze(-1)
    return (q_OGi * weight.scale.unsqueeze(-1)).view(out_features, in_features)


def pack_int32(q: Tensor, num_bits: int) -> Tensor:
    """Packs signed codes densely into 32-bit words along the last dimension, lowest bits first.

    Code i of a row occupies bits [i*b, (i+1)*b) of the row's bit string, so a 3-bit code may straddle two
    words; the row is padded with zero bits to a whole word. This is compressed-tensors' layout from 0.19 on.

    Args:
        q: int8 [R, C], codes in [-2^(b-1), 2^(b-1)-1].
    Returns:
        int32 [R, ceil(C*b/32)].
    """
    rows, columns = q.shape
    unsigned = q.to(torch.int64) + (1 << (num_bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -columns % 32)).view(rows, -1, 32)
    start = torch.arange(32) * num_bits
    word, shift = start // 32, start % 32
    packed = torch.zeros(rows, unsigned.shape[1], num_bits + 1, dtype=torch.int64)
    shifted = unsigned << shift
    packed.index_add_(2, word, shifted & 0xFFFFFFFF)
    packed.index_add_(2, word + 1, shifted >> 32)
    packed = packed[..., :num_bits].reshape(rows, -1)[:, : -(-columns * num_bits // 32)]
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_int32(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """Inverse of `pack_int32`: int8 [R, columns] from int32 [R, words]."""
    words = torch.nn.functional.pad(packed.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    start = torch.arange(columns) * num_bits
    word, shift = start // 32, start % 32
    pair = words[:, word] | (words[:, word + 1] << 32)
    unsigned = (pair >> shift) & ((1 << num_bits) - 1)
    return (unsigned - (1 << (num_bits - 1))).to(torch.int8)


def has_bf16_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 tiles in hardware (Intel AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


@contextmanager
def bf16_products() -> Iterator[None]:
    """Within it, float32 matrix products on an AMX CPU multiply in bfloat16 and add in float32.

    Exact for operands that hold bfloat16 values, and several times faster there; elsewhere it changes nothing.
    """
    backend: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made by torch at run time
    before = backend.fp32_precision
    if has_bf16_matrix_unit():
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before
