"""The arithmetic of quantization: parameters, rounding, packing. Pure functions of tensors.

A value is `(q - zero) * scale`, as in compressed-tensors. Integer codes `q` are signed, in [-2^(b-1), 2^(b-1)-1]; other
formats shift into their own ranges when they are written. A float code stands for itself: `q` is the number that
E4M3 or E2M1 writes down, so that every line that works on integers works on floats too. Scales are rounded to the
precision in which they are stored *before* the codes are chosen, so that what a solver minimises is what a loader
will see: bfloat16; E4M3 below one scale of the tensor (NVFP4); a power of two (MXFP4); a multiple of a step that 256
columns share (K-quants).

E4M3 and E2M1 are those of the OCP's formats (OFP8 1.0, Microscaling 1.0): round to nearest, ties to even, saturating.

Left out: E5M2, 6-bit floats, and MXFP8.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.schemes import E2M1_MAX, E4M3_MAX, SUPER, QuantArgs

_TINY = 2.0**-100  # a group of zeros gets this scale: finite, positive, and its codes are zero
LEAST_HALF = 2.0**-24  # the smallest positive float16
_E4M3_TINY = 2.0**-9  # the smallest positive E4M3
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the fourth bit is the sign


@dataclass(frozen=True)
class QuantizedWeight:
    """A coded weight.

    Attributes:
        q_OI: codes [O, I] in the dtype of `code_dtype`: int8, or for floats the numbers themselves in float8_e4m3fn
            (which holds E2M1 exactly).
        scale: float32 [O, G] (G = 1 for channel; [1, 1] for tensor), in the precision in which it is stored; the rows
            of a block have equal scales. The value of a code is `(q - zero) * scale`, whatever the strategy.
        zero: int8 [O, G] zero points in the codes' range, None when symmetric; float32 with strategy "super_group",
            whose groups store their least value rather than a code.
        loss: the solver's own objective, for the record; not comparable between methods.
        notes: named numerical fallbacks that were taken, for the report.
        global_scale: strategy "tensor_group": float32 [1], `scale` is an E4M3 number divided by it. Strategy
            "super_group": the steps float32 [O, S, 2] of scales and of least values, S super-groups a row.
        input_scale: float32 [1], for static input activations: what their codes are multiplied with.
        g_idx_I: int32 [I], the group of each column, where groups are not cut in the columns' order; else None.
    """

    q_OI: Tensor
    scale: Tensor
    zero: Tensor | None
    loss: float = 0.0
    notes: tuple[str, ...] = ()
    global_scale: Tensor | None = None
    input_scale: Tensor | None = None
    g_idx_I: Tensor | None = None

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """The part of a weight that was solved stacked with others."""
        scale, zero = (t if t is None or len(t) == 1 else t[start:end] for t in (self.scale, self.zero))
        assert scale is not None
        told = scale_rows(self.global_scale, start, end)
        return QuantizedWeight(self.q_OI[start:end], scale, zero, global_scale=told, g_idx_I=self.g_idx_I)


def scale_rows(global_scale: Tensor | None, start: int, end: int) -> Tensor | None:
    """What is told of some rows: their own steps, or the global scale of all (see `tensor_scale`)."""
    return global_scale if global_scale is None or global_scale.dim() == 1 else global_scale[start:end]


def code_dtype(args: QuantArgs) -> torch.dtype:
    """The dtype of codes in memory, one byte each."""
    return torch.int8 if args.type == "int" else torch.float8_e4m3fn


def round_scale(scale: Tensor) -> Tensor:
    """The stored precision of a scale (bfloat16), as float32; zeros become a tiny positive number."""
    return scale.clamp_min(_TINY).bfloat16().float()


def zero_dtype(args: QuantArgs) -> torch.dtype:
    """The dtype of zero points: codes, or with strategy "super_group" any number."""
    return torch.float32 if args.strategy == "super_group" else torch.int8


def tensor_scale(w_OI: Tensor, args: QuantArgs) -> Tensor | None:
    """What the scales of a weight's groups are told in: a global scale float32 [1] with strategy "tensor_group", the
    steps float32 [O, S, 2] (see `super_steps`) with "super_group", else None.

    The global scale maps the largest value onto the largest scale times the largest code, as compressed-tensors does,
    but rounded down to a power of two: the scales below it are floats, so they lose nothing, and a value (2 and 4 bits
    of mantissa) is then exact in bfloat16, in which loaders expand it.
    """
    if args.strategy == "super_group":
        return super_steps(w_OI, args)
    if args.strategy != "tensor_group":
        return None
    _, exponent = torch.frexp(E4M3_MAX * E2M1_MAX / w_OI.abs().max().clamp_min(_TINY))
    return torch.ldexp(torch.ones(1), exponent - 1)


def super_steps(w_OI: Tensor, args: QuantArgs) -> Tensor:
    """The steps float32 [O, S, 2], float16 numbers, of which groups' scales and least values are multiples.

    They make the largest of a super-group's plain ranges `args.most_steps` steps long.
    """
    size = args.group_size
    assert size is not None
    w_OSgi = w_OI.view(len(w_OI), -1, SUPER // size, size)
    low, high = w_OSgi.amin(-1).clamp_max(0), w_OSgi.amax(-1).clamp_min(0)
    reach = torch.maximum(-low, high) * 2 if args.symmetric else high - low
    largest_OS2 = torch.stack([reach.amax(-1) / (args.qmax - args.qmin), -low.amin(-1)], -1)
    return (largest_OS2 / args.most_steps).clamp_min(LEAST_HALF).half().float()


def _super_qparams(low: Tensor, high: Tensor, args: QuantArgs, steps: Tensor) -> tuple[Tensor, Tensor | None]:
    """`qparams` of groups [O, G] below super-groups with these steps [O, S, 2]."""
    scale_step, low_step = steps.repeat_interleave(low.shape[-1] // steps.shape[-2], -2).unbind(-1)
    reach = torch.maximum(low.abs(), high.abs()) * 2 if args.symmetric else high.clamp_min(0) - low.clamp_max(0)
    count = (reach / (args.qmax - args.qmin) / scale_step).round().clamp(1, args.most_steps)
    scale = scale_step * count
    if args.symmetric:
        return scale, None
    least = low_step * (low.clamp_max(0).neg() / low_step).round().clamp(0, args.most_steps)
    return scale, least / scale + args.qmin


def power_of_two_scale(largest: Tensor) -> Tensor:
    """MXFP4's scale of groups with these largest magnitudes, a power of two, float32 of the same shape.

    The largest value's exponent less two, E2M1's own; one more where the value would still exceed 7 codes
    (compressed-tensors' rule; Microscaling 1.0 never adds one, and clips up to 8 codes to 6).
    """
    mantissa, exponent = torch.frexp(largest.clamp_min(_TINY))  # mantissa in [1/2, 1)
    exponent = exponent - 3 + (mantissa >= 0.875)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def qparams(
    low: Tensor, high: Tensor, args: QuantArgs, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that map [low, high] onto the codes.

    Symmetric: the scale is max(|low|, |high|) / ((2^b - 1) / 2), for floats over the largest code. Asymmetric: the
    range is stretched to hold zero, so that zero is exact, and one step below it: AutoGPTQ's checkpoints store the
    zero point less one, and cannot say that it is the smallest code.

    Args:
        low, high: float32 tensors of one shape, the ends of each range.
        global_scale: `tensor_scale`, with strategies "tensor_group" and "super_group".
    Returns:
        scale float32 and zero in `zero_dtype` (None when symmetric), of that shape.
    """
    if args.scale_kind == "steps":
        assert global_scale is not None, "`tensor_scale` comes first"
        return _super_qparams(low, high, args, global_scale)
    if args.symmetric:
        largest = torch.maximum(low.abs(), high.abs())
        if args.scale_kind == "e8m0":
            return power_of_two_scale(largest), None
        scale = largest / ((args.qmax - args.qmin) / 2)
        if args.scale_kind == "bfloat16":
            return round_scale(scale), None
        assert global_scale is not None, "`tensor_scale` comes first"
        return _round_e4m3((scale * global_scale).clamp_min(_E4M3_TINY)) / global_scale, None
    high = high.clamp_min(0)
    low = torch.minimum(low, high / -(args.qmax - args.qmin - 1))
    scale = round_scale((high - low) / (args.qmax - args.qmin))
    zero = (args.qmin - low / scale).round().clamp(args.qmin + 1, args.qmax)
    return scale, zero.to(torch.int8)


def quantize(w: Tensor, scale: Tensor, zero: Tensor | float, args: QuantArgs) -> Tensor:
    """Nearest codes of `w` as float32; `scale` and `zero` broadcast against it."""
    if args.type == "float":
        return _round_e4m3(w / scale) if args.num_bits == 8 else _round_e2m1(w / scale)
    return w.div(scale).add_(zero).round_().clamp_(args.qmin, args.qmax)


def _round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 number, ties to even, saturating; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 number, ties to even, saturating; NaN stays NaN.

    Its numbers are 0.5 apart below 2, 1 apart below 4, and 2 apart up to 6: in units of that step an even mantissa
    is an even integer.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
    return x.div_(step).round_().mul_(step)


def divided(weight: QuantizedWeight, rows_C: Tensor, scale_C: Tensor) -> QuantizedWeight:
    """The coded weight with some of its rows divided: the codes stay, their scales are divided and rounded again.

    Args:
        weight: with a scale for each row at least.
        rows_C: int64, the rows.
        scale_C: float32, what each is divided by.
    """
    assert len(weight.scale) == len(weight.q_OI), "a scale for each row"
    scale = weight.scale.clone()
    scale[rows_C] = round_scale(scale[rows_C] / scale_C.unsqueeze(1))
    return replace(weight, scale=scale)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """float32 [O, I] values of a coded weight."""
    if weight.g_idx_I is not None:
        g_I = weight.g_idx_I.long()
        shift_OI = 0.0 if weight.zero is None else weight.zero.float()[:, g_I]
        return (weight.q_OI.float() - shift_OI) * weight.scale[:, g_I]
    out_features, in_features = weight.q_OI.shape
    groups = weight.scale.shape[-1]
    q_OGi = weight.q_OI.float().view(out_features, groups, in_features // groups)
    if weight.zero is not None:
        q_OGi = q_OGi - weight.zero.float().unsqueeze(-1)
    return (q_OGi * weight.scale.unsqueeze(-1)).view(out_features, in_features)


def quantize_activations(x: Tensor, args: QuantArgs, scale: Tensor | None = None) -> Tensor:
    """The values that a layer with quantized inputs sees of `x` [..., I]: coded and decoded, in the dtype of `x`.

    Dynamic scales are max |x| over the largest code ((2^b - 1) / 2 for integers) of each token or group, in
    float32; runtimes that find them in bfloat16, or divide by 127, differ by that rounding.

    Args:
        args: strategy "token" or "group", dynamic; or "tensor", static.
        scale: float32 [1], the static scale.
    """
    x_Gi = x.float().view(*x.shape[:-1], -1, args.span(x.shape[-1]))
    if args.dynamic:
        scale = x_Gi.abs().amax(-1, keepdim=True) / ((args.qmax - args.qmin) / 2)
        scale = scale.clamp_min(_TINY)
    assert scale is not None, "a static scale is measured first"
    return quantize(x_Gi, scale, 0.0, args).mul_(scale).flatten(-2).to(x.dtype)


def static_scale(largest: Tensor, args: QuantArgs) -> Tensor:
    """The static scale float32 [1] of activations whose largest magnitude is `largest`, a number."""
    return round_scale(largest.float() / ((args.qmax - args.qmin) / 2)).view(1)


def pack_fp4(q_OI: Tensor) -> Tensor:
    """E2M1 numbers, two codes a byte along the last dimension, the first in the low half.

    Args:
        q_OI: E2M1 numbers [O, I] in any float dtype, I even.
    Returns:
        uint8 [O, I/2].
    """
    q_OI = q_OI.float()
    thresholds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(_E2M1)])
    code_OI = torch.bucketize(q_OI.abs(), thresholds) + 8 * torch.signbit(q_OI)
    return (code_OI[:, ::2] + 16 * code_OI[:, 1::2]).to(torch.uint8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Inverse of `pack_fp4`: float8_e4m3fn [O, I] from uint8 [O, I/2]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int64)
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)])[codes].to(torch.float8_e4m3fn)


def pack_e8m0(scale: Tensor) -> Tensor:
    """Powers of two as biased exponents, uint8 of the same shape."""
    return (torch.frexp(scale).exponent + 126).to(torch.uint8)


def unpack_e8m0(code: Tensor) -> Tensor:
    """Inverse of `pack_e8m0`: float32."""
    return torch.ldexp(torch.ones(code.shape), code.to(torch.int32) - 127)


def pack_int32(q: Tensor, num_bits: int) -> Tensor:
    """Packs signed codes densely into 32-bit words along the last dimension, lowest bits first.

    Code i of a row occupies bits [i*b, (i+1)*b) of the row's bit string, so a 3-bit code may straddle two
    words; the row is padded with zero bits to a whole word. This is compressed-tensors' layout from 0.19 on.

    Args:
        q: int8 [R, C], codes in [-2^(b-1), 2^(b-1)-1].
    Returns:
        int32 [R, ceil(C*b/32)].
    """
    return torch.cat([_pack_rows(part, num_bits) for part in torch.split(q, _rows_at_a_time(q.shape[1]))])


def _rows_at_a_time(columns: int) -> int:
    """So many rows of codes that what is made of them on the way, some 40 bytes a code, takes 40 MB."""
    return max(1, (1 << 20) // max(1, columns))


def _pack_rows(q: Tensor, num_bits: int) -> Tensor:
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
    parts = torch.split(packed, _rows_at_a_time(columns))
    return torch.cat([_unpack_rows(part, num_bits, columns) for part in parts])


def _unpack_rows(packed: Tensor, num_bits: int, columns: int) -> Tensor:
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
