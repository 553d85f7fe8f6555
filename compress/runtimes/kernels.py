"""Products with coded weights: which of torch's kernels makes which, in one table.

The idea: decoding reads every weight for every token, so a kernel that reads codes is faster by the bytes that it
does not read. A prompt's many rows are another matter: there the arithmetic counts, which torch does fastest in
bfloat16, so that codes are expanded for each product, some outputs at a time, into a buffer that stays. Where few rows
end and many begin depends on machine and shape: see `crossover`.

int4pack lays codes down in an order of its own, which differs by processor; oneDNN's cannot even be seen. So whatever
is packed multiplies random signs once, and is held against the product with its codes.

Left out: kernels of other libraries, and of our own. Codes of 5 and more bits in groups, groups of 16 and floats have
no kernel in torch on CPUs that is faster than bfloat16: they are expanded when they are loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.errors import CompressError
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import QuantArgs, Scheme

_ROWS = 64  # outputs that int4pack lays down together, on the widest processors
_GROUPS = (256, 128, 64, 32)  # that it knows
_PART_BYTES = 1 << 26  # of an expanded weight at a time
_TILE = 64  # outputs whose codes are expanded at a time: their float32 values stay in the cache
_LEAST = 2.0**-14  # the smallest number that float16 holds in full precision
_PROBES = 2  # rows of random signs

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """A weight [O, I] as a kernel wants it.

    Attributes:
        tensors: what is kept in memory.
        product: x bfloat16 [N, I] to x wᵀ bfloat16 [N, O].
    """

    tensors: tuple[Tensor, ...]
    product: Product


@dataclass(frozen=True)
class Line:
    """A line of the table: on a device, weights that are held so are multiplied by these kernels."""

    device: str
    held: str
    few: str
    many: str


TABLE = (
    Line("cpu", "int4", few="int4pack", many="int4expand"),
    Line("cpu", "int8", few="int8pack", many="int8expand"),
    Line("cpu", "int8×int8", few="onednn_int8", many="onednn_int8"),
)
EXPANDED = "bfloat16"  # how anything else is held: expanded when it is loaded


def line(device: str, held: str) -> Line:
    """The table's line."""
    return next(found for found in TABLE if (found.device, found.held) == (device, held))


def how_held(scheme: Scheme, shape: tuple[int, int]) -> tuple[str, str]:
    """How a weight [O, I] is held, and, where that is expanded, what it was that no kernel reads.

    Integers to 4 bits are "int4", whatever their bits on the disk.
    """
    args, inputs = scheme.weights, scheme.input_activations
    whole_rows = args.strategy in ("channel", "tensor") and args.symmetric
    if args.type == "float":
        return EXPANDED, f"float{args.num_bits}"
    if inputs is not None:
        fits = args.num_bits == 8 and whole_rows and inputs.type == "int" and inputs.strategy in ("token", "tensor")
        return ("int8×int8", "") if fits else (EXPANDED, scheme.text)
    if args.num_bits == 8 and whole_rows:
        return "int8", ""
    if args.num_bits > 4 or _kernel_group(args, shape[1]) is None:
        return EXPANDED, scheme.text
    return "int4", ""


def _kernel_group(args: QuantArgs, in_features: int) -> int | None:
    """The group size with which int4pack reads a coding, None when there is none."""
    span = args.span(in_features)
    return next((group for group in _GROUPS if span % group == 0 and in_features % group == 0), None)


def _in_groups(weight: QuantizedWeight, args: QuantArgs) -> tuple[Tensor, Tensor, int]:
    """A weight's groups as int4pack knows them: scales and zero points float32 [O, G], and their size."""
    out_features, in_features = weight.q_OI.shape
    group = _kernel_group(args, in_features)
    assert group is not None, "`how_held` comes first"
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero.float()
    scale_OG, zero_OG = (
        t.expand(out_features, -1).repeat_interleave(in_features // group // t.shape[1], 1)
        for t in (weight.scale, zero)
    )
    return scale_OG, zero_OG, group


def int4pack(weight: QuantizedWeight, scheme: Scheme) -> Packed:
    """`aten::_weight_int4pack_mm_for_cpu`: value = (code − 8) · scale + offset, scale and offset in bfloat16.

    Codes are packed some rows at a time, since the kernel takes them as int32; rows of zeros fill up multiples of 64.
    """
    scale_OG, zero_OG, group = _in_groups(weight, scheme.weights)
    out_features = len(weight.q_OI)
    fill = (0, 0, 0, -out_features % _ROWS)
    lay_down = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    parts = torch.split(functional.pad(weight.q_OI, fill), 16 * _ROWS)
    packed = torch.cat([lay_down(part_OI.int() + 8, 1) for part_OI in parts])
    both_GO2 = functional.pad(torch.stack([scale_OG, -zero_OG * scale_OG]), fill).bfloat16().permute(2, 1, 0)
    both_GO2 = both_GO2.contiguous()

    def product(x_NI: Tensor) -> Tensor:
        y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, packed, group, both_GO2)
        return y_NO[:, :out_features] if fill[-1] else y_NO

    return Packed((packed, both_GO2), product)


def int4expand(weight: QuantizedWeight, scheme: Scheme) -> Packed:
    """Expands a second copy of the codes by `quantized::embedding_bag_4bit_unpack`, torch's fastest way.

    That reads rows of codes, two a byte, with a float16 scale and offset after them: here a row for each group. Scales
    are told in units of a power of two where float16 could not hold them, and the products are multiplied by it.
    """
    scale_OG, zero_OG, group = _in_groups(weight, scheme.weights)
    out_features, in_features = weight.q_OI.shape
    unit = 1.0
    if bool(scale_OG.min() < _LEAST) or bool(scale_OG.max() > 1):
        unit = 2.0 ** torch.frexp(scale_OG.max()).exponent.item()
    code_Rg = (weight.q_OI + 8).view(torch.uint8).reshape(-1, group)
    scale_R1 = (scale_OG / unit).reshape(-1, 1)
    offset_R1 = -(8 + zero_OG).reshape(-1, 1) * scale_R1
    ends = [t.half().view(torch.uint8) for t in (scale_R1, offset_R1)]
    rows_RB = torch.cat([code_Rg[:, ::2] | code_Rg[:, 1::2] << 4, *ends], 1)
    each = in_features // group
    unpack = torch.ops.quantized.embedding_bag_4bit_unpack

    def expand(start: int, part_OI: Tensor) -> None:
        tiles = torch.split(part_OI.view(-1, group), _TILE * each)
        coded = torch.split(rows_RB[start * each : (start + len(part_OI)) * each], _TILE * each)
        for tile_Rg, tile_RB in zip(tiles, coded, strict=True):
            tile_Rg.copy_(unpack(tile_RB))

    by_parts = _expanding(expand, (out_features, in_features))
    return Packed((rows_RB,), by_parts if unit == 1 else lambda x_NI: by_parts(x_NI).mul_(unit))


def int8pack(weight: QuantizedWeight, scheme: Scheme) -> Packed:
    """`aten::_weight_int8pack_mm`: codes as they are, a scale in bfloat16 for each output."""
    del scheme
    scale_O = _by_row(weight).bfloat16()
    q_OI = weight.q_OI
    return Packed((q_OI, scale_O), lambda x_NI: torch.ops.aten._weight_int8pack_mm(x_NI, q_OI, scale_O))


def int8expand(weight: QuantizedWeight, scheme: Scheme) -> Packed:
    """Codes as bfloat16 numbers, which hold them exactly; the products are multiplied by the outputs' scales."""
    del scheme
    scale_O = _by_row(weight).bfloat16()
    q_OI = weight.q_OI
    by_parts = _expanding(lambda start, part_OI: part_OI.copy_(q_OI[start : start + len(part_OI)]), q_OI.shape)
    return Packed((q_OI, scale_O), lambda x_NI: by_parts(x_NI).mul_(scale_O))


def onednn_int8(weight: QuantizedWeight, scheme: Scheme) -> Packed:
    """`onednn::qlinear_pointwise`: inputs are coded too, and integers multiplied.

    It takes one scale of inputs a call, so it is told 1; the tokens' own multiply its float32 products.
    """
    args, static = scheme.input_activations, weight.input_scale
    assert args is not None
    out_features, in_features = weight.q_OI.shape
    packed = torch.ops.onednn.qlinear_prepack(weight.q_OI, [1, in_features])
    scale_O, zero_O = _by_row(weight), torch.zeros(out_features, dtype=torch.int32)
    most = (args.qmax - args.qmin) / 2
    multiply = torch.ops.onednn.qlinear_pointwise

    def product(x_NI: Tensor) -> Tensor:
        if static is None:
            scale_N1 = torch.linalg.vector_norm(x_NI, torch.inf, -1, keepdim=True, dtype=torch.float32)
            scale_N1 = scale_N1.div_(most).clamp_min_(2.0**-100)
        else:
            scale_N1 = static
        q_NI = torch.div(x_NI, scale_N1).round_().clamp_(args.qmin, args.qmax).to(torch.int8)
        y_NO = multiply(q_NI, 1.0, 0, packed, scale_O, zero_O, None, 1.0, 0, torch.float32, "none", [], "")
        return torch.mul(y_NO, scale_N1, out=x_NI.new_empty(y_NO.shape))

    return Packed((packed, scale_O), product)


def _by_row(weight: QuantizedWeight) -> Tensor:
    """A scale for each output, float32 [O]."""
    return weight.scale.expand(len(weight.q_OI), 1).reshape(-1).contiguous()


_buffers: dict[int, Tensor] = {}  # one for the process: fresh memory would cost more than what is written into it


def _buffer(numbers: int) -> Tensor:
    """Room for bfloat16 numbers."""
    if numbers not in _buffers:
        _buffers.clear()
        _buffers[numbers] = torch.empty(numbers, dtype=torch.bfloat16)
    return _buffers[numbers]


def _expanding(expand: Callable[[int, Tensor], object], shape: tuple[int, ...]) -> Product:
    """x wᵀ for which some outputs' weights at a time are written into the buffer.

    Args:
        expand: writes the rows of w from a first one on into a bfloat16 [o, I].
    """
    out_features, in_features = shape
    rows = max(_TILE, _PART_BYTES // 2 // in_features // _TILE * _TILE)

    def product(x_NI: Tensor) -> Tensor:
        y_NO = x_NI.new_empty(len(x_NI), out_features)
        buffer = _buffer(_PART_BYTES // 2)
        for start in range(0, out_features, rows):
            end = min(start + rows, out_features)
            part_OI = buffer[: (end - start) * in_features].view(-1, in_features)
            expand(start, part_OI)
            torch.mm(x_NI, part_OI.t(), out=y_NO[:, start:end])
        return y_NO

    return product


KERNELS: dict[str, Callable[[QuantizedWeight, Scheme], Packed]] = {
    "int4pack": int4pack, "int4expand": int4expand, "int8pack": int8pack, "int8expand": int8expand,
    "onednn_int8": onednn_int8,
}  # fmt: skip


def pack(kernel: str, weight: QuantizedWeight, scheme: Scheme, where: str) -> Packed:
    """A weight packed for a kernel of the table, and tried.

    Raises:
        CompressError: the kernel does not multiply with these codes: another processor's layout, or a torch that
            changed it.
    """
    packed = KERNELS[kernel](weight, scheme)
    generator = torch.Generator().manual_seed(0)
    signs_NI = torch.randint(0, 2, (_PROBES, weight.q_OI.shape[1]), generator=generator).mul_(2).sub_(1)
    found_NO = packed.product(signs_NI.bfloat16()).float()
    expected_NO = torch.cat([signs_NI.float() @ w_OI.t() for w_OI in _decoded_parts(weight)], 1)
    if not bool((found_NO - expected_NO).norm() <= 2.0**-6 * expected_NO.norm()):
        raise CompressError(
            f"torch {torch.__version__}'s kernel {kernel} does not compute this weight here", where=where,
            hint="use the runtime hf, and report it: the packed layout has changed",
        )  # fmt: skip
    return packed


def _decoded_parts(weight: QuantizedWeight) -> Iterator[Tensor]:
    """The values of some rows at a time."""
    for start in range(0, len(weight.q_OI), 1024):
        yield dequantize(weight.rows(start, start + 1024))
