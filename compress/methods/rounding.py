"""Rounding to the nearest code, and the round over a block's weights: what the methods have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.methods.scale_search import minmax_qparams, search_qparams
from compress.numerics import QuantizedWeight, code_dtype, quantize, tensor_scale
from compress.schemes import QuantArgs, Scheme

Solve = Callable[[Tensor, Tensor, QuantArgs], QuantizedWeight]


def round_to_nearest(w_OI: Tensor, gram_II: Tensor | None, args: QuantArgs, scale_search: bool) -> QuantizedWeight:
    """Nearest codes of a float32 weight.

    Args:
        w_OI: float32 weights, of any strategy; the rows of a stacked weight must be cut where blocks end.
        gram_II: float32 XᵀX / N of the inputs; None counts every column alike (G = 1).
        scale_search: in ranges of least weighted error, rather than the plain minimum and maximum.
    Returns:
        Codes and parameters; `loss` is tr(ΔW G ΔWᵀ).
    Raises:
        ValueError: the weights are not finite.
    """
    if not bool(torch.isfinite(w_OI).all()):
        raise ValueError("the weights hold values that are not finite")
    if scale_search:
        scale, zero = search_qparams(w_OI, gram_II, args)
    else:
        scale, zero = minmax_qparams(w_OI, args)
    w_OGi = w_OI.view(w_OI.shape[0], scale.shape[-1], -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    q_OGi = quantize(w_OGi, scale.unsqueeze(-1), shift, args)
    delta_OI = ((q_OGi - shift) * scale.unsqueeze(-1) - w_OGi).view_as(w_OI)
    q_OI = q_OGi.to(code_dtype(args)).view_as(w_OI)
    return QuantizedWeight(q_OI, scale, zero, output_loss(delta_OI, gram_II), global_scale=tensor_scale(w_OI, args))


def output_loss(delta_OI: Tensor, gram_II: Tensor | None) -> float:
    """tr(ΔW G ΔWᵀ), the mean over inputs of the squared change of the output; without G that of the weights."""
    if gram_II is None:
        return float(delta_OI.square().sum(dtype=torch.float64))
    return float(((delta_OI @ gram_II) * delta_OI).sum(dtype=torch.float64))


def solve_together(block: Any, rows: dict[str, Scheme], solve: Solve) -> None:
    """Solves a block's weights from their Gram matrices: those that read the same input in one scheme are stacked."""
    for weights, gram_II in block.sublayers():
        for scheme in dict.fromkeys(rows[name] for name in weights):
            names = [name for name in weights if rows[name] == scheme]
            stacked_OI = torch.cat([block.weight(name) for name in names])
            block.set(names, solve(stacked_OI, gram_II, scheme.weights))
