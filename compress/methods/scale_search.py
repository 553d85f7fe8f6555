"""Group scales by the least weighted error, shared by every method that rounds.

The range of a group decides between clipping its largest values and rounding all of them coarsely. Instead of
the plain minimum and maximum, this tries a fixed grid of narrower ranges and keeps, for each group, the one
with the least output error δᵀ G δ, δ = w − dq(q(w; p · range)), where G is the part of the inputs' Gram matrix between
the group's own columns. A method that mends a rounding error in the columns to come (GPTQ) asks for G's diagonal alone,
and so does anyone whose groups are longer than 256, for which the products would cost more than they tell. Without a
Gram matrix every column counts alike. The grid contains p = 1, so the result is never worse than the plain range.

8-bit floats keep the plain range: their steps shrink with the values, so a narrower range gains nothing. So do scales
that a whole tensor or block shares.

Left out: a second search over the zero point; the cross terms between groups; wider ranges for MXFP4, whose plain range
may clip.
"""

import torch
from torch import Tensor

from compress.numerics import qparams, quantize, scale_rows, tensor_scale
from compress.schemes import QuantArgs

# Low bits want narrow ranges: the optimal clip of a Gaussian is 1.0 sigma at 2 bits and 2.5 at 4.
_NARROWEST = {2: 0.30, 3: 0.45, 4: 0.60}
_STEPS = 32
_CHUNK_VALUES = 1 << 16  # the working set of a chunk stays in a core's cache
_LONGEST_GRAM = 256  # columns of a group, up to which their cross terms are counted


def minmax_qparams(w_OI: Tensor, args: QuantArgs, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point [O, G] of the plain range of each group ([1, 1] for strategy "tensor").

    Args:
        global_scale: what the groups' scales are told in, by default `tensor_scale(w_OI)`.
    """
    if args.strategy == "tensor":
        return qparams(w_OI.min().view(1, 1), w_OI.max().view(1, 1), args)
    out_features, in_features = w_OI.shape
    w_OGi = w_OI.view(out_features, -1, args.span(in_features))
    low_OG, high_OG = w_OGi.amin(-1), w_OGi.amax(-1)
    if args.block_structure:
        rows = args.block_structure[0]
        low_OG, high_OG = (
            find(range_OG.view(out_features // rows, rows, -1), 1).repeat_interleave(rows, 0)
            for find, range_OG in ((torch.amin, low_OG), (torch.amax, high_OG))
        )
    return qparams(low_OG, high_OG, args, _global_scale(w_OI, args, global_scale))


def _global_scale(w_OI: Tensor, args: QuantArgs, given: Tensor | None) -> Tensor | None:
    return tensor_scale(w_OI, args) if given is None else given


def search_qparams(
    w_OI: Tensor, weighting: Tensor | None, args: QuantArgs, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale float32 [O, G] and zero point [O, G] (None when symmetric) of least weighted error.

    Args:
        w_OI: float32 weights.
        weighting: float32 Gram matrix [I, I] of the inputs, or only its diagonal [I]; None counts columns alike.
        args: with strategies "tensor" and "block", and for 8-bit floats, the plain range is returned.
        global_scale: what the groups' scales are told in, by default `tensor_scale(w_OI)`.
    """
    if args.strategy in ("tensor", "block") or (args.type == "float" and args.num_bits == 8):
        return minmax_qparams(w_OI, args, global_scale)
    global_scale = _global_scale(w_OI, args, global_scale)
    in_features = w_OI.shape[1]
    weights = _by_group(torch.ones(in_features) if weighting is None else weighting, args.span(in_features))
    rows = max(1, _CHUNK_VALUES // in_features)
    scales, zeros = [], []
    for start in range(0, len(w_OI), rows):
        w_Oi = w_OI[start : start + rows]
        told = scale_rows(global_scale, start, start + rows)
        scale, zero = _search_rows(w_Oi.view(len(w_Oi), len(weights), -1), weights, args, told)
        scales.append(scale)
        zeros.append(zero)
    zero_points = None if args.symmetric else torch.cat([z for z in zeros if z is not None])
    return torch.cat(scales), zero_points


def _by_group(weighting: Tensor, group: int) -> Tensor:
    """The Gram matrices of the groups [G, g, g], or where these are too long the diagonals [G, g]."""
    if weighting.dim() == 1 or group > _LONGEST_GRAM:
        return (weighting if weighting.dim() == 1 else weighting.diagonal()).reshape(-1, group)
    count = len(weighting) // group
    return torch.stack([part[i] for i, part in enumerate(weighting.view(count, group, count, group).transpose(1, 2))])


def _errors(delta_OGi: Tensor, weights: Tensor) -> Tensor:
    """Weighted squared errors [O, G] by groups' Gram matrices or their diagonals."""
    if weights.dim() == 2:
        return delta_OGi.square_().mul_(weights).sum(-1)
    delta_GOi = delta_OGi.transpose(0, 1).contiguous()
    return torch.bmm(delta_GOi, weights).mul_(delta_GOi).sum(-1).t()


def _search_rows(
    w_OGi: Tensor, weights: Tensor, args: QuantArgs, global_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    low, high = w_OGi.amin(-1), w_OGi.amax(-1)
    best_error: Tensor | None = None
    best_scale, best_zero = qparams(low, high, args, global_scale)
    for p in torch.linspace(1.0, _NARROWEST.get(args.num_bits, 0.8), _STEPS).tolist():
        scale, zero = qparams(low * p, high * p, args, global_scale)
        shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
        delta = quantize(w_OGi, scale.unsqueeze(-1), shift, args).sub_(shift).mul_(scale.unsqueeze(-1))
        error = _errors(delta.sub_(w_OGi), weights)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero
