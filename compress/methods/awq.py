"""AWQ: scale up the input channels that matter, so that rounding hurts them less, and scale down what feeds them.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv:2306.00978.
Before rounding, column i of the weights is multiplied by s_i and the layer in front (a norm, or the linear whose
output is read) divided by it: nothing changes but the rounding. The scales come from the grid of section 3.2,

    s = x^r              x_i: how large input channel i is,
    s = x^r / w^(1-r)    w_i: the mean of |W| in column i, each group relative to its largest weight,

for r in [0, 1]; s = 1 is in the grid, so the choice is never worse than none by its own measure. That measure is the
layer's output error tr(ΔW G ΔWᵀ) with G the Gram matrix of its inputs, ΔW = Q(W s) / s − W: the search needs no
forward pass. For x_i the paper takes the mean of |x_i|; here it is the root of the mean square, which is G's diagonal.
Groups of weights that read one input share their scales, as they must.

The paper's clipping is `scale_search`: ranges of least output error within each group.

Left out: the paper's loss on the whole block's output, which costs a forward pass for each candidate.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.methods.base import StepConfig
from compress.methods.scale_search import minmax_qparams
from compress.numerics import quantize
from compress.schemes import QuantArgs

_FLOOR = 1e-4  # the least scale; a channel that is always zero would get none
_ROWS = 512  # of the weights, evenly spread, by which a candidate is judged


class AwqConfig(StepConfig):
    """AWQ's keys in a recipe.

    Attributes:
        scheme: how the weights are coded then; null when a later step codes them.
        grid: values of r between 0 and 1.
        duo_scaling: whether weights take part in the scales: false, true or "both" (all candidates of the two).
        scale_search: choose group ranges by output error rather than the plain minimum and maximum.
    """

    method: Literal["awq"] = "awq"
    grid: int = Field(default=20, ge=1, le=1000)
    duo_scaling: bool | Literal["both"] = "both"
    scale_search: bool = True


@dataclass(frozen=True)
class Choice:
    """The scales that were chosen, float32 [I], and the loss with them and without any."""

    scale_I: Tensor
    loss: float
    loss_without: float
    name: str


def search_scale(w_OI: Tensor, gram_II: Tensor, args: QuantArgs, config: AwqConfig) -> Choice:
    """Scales of the input channels with the least output error after rounding.

    Args:
        w_OI: float32 weights, all that read the input, stacked along their rows.
        gram_II: float32 XᵀX / N of the input.
        args: how the weights will be coded.
    """
    w_RI = w_OI[torch.linspace(0, len(w_OI) - 1, min(_ROWS, len(w_OI))).long()]
    without = output_error(w_RI, w_RI, gram_II, args)
    best = Choice(torch.ones(w_OI.shape[1]), without, without, "none")
    x_I = gram_II.diagonal().clamp_min(0).sqrt()
    w_I = relative_magnitude(w_OI, args)
    duo = {"both": (False, True), True: (True,), False: (False,)}[config.duo_scaling]
    for with_weights in duo:
        for ratio in torch.linspace(0, 1, config.grid + 1).tolist():
            scale_I = candidate(x_I, w_I, ratio, with_weights)
            loss = output_error(w_RI, w_RI * scale_I, gram_II, args, scale_I)
            if loss < best.loss:  # never for what is not a number
                name = f"r = {ratio:.2f}{' with weights' if with_weights else ''}"
                best = Choice(scale_I, loss, without, name)
    return best


def candidate(x_I: Tensor, w_I: Tensor, ratio: float, with_weights: bool) -> Tensor:
    """One scale vector of the grid, normalised so that its largest and smallest balance."""
    scale_I = x_I.pow(ratio)
    if with_weights:
        scale_I = scale_I / (w_I.pow(1 - ratio) + _FLOOR)
    scale_I = scale_I.clamp_min(_FLOOR)
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def relative_magnitude(w_OI: Tensor, args: QuantArgs) -> Tensor:
    """Mean over the rows of |W|, each group relative to its largest weight, float32 [I]."""
    out_features, in_features = w_OI.shape
    w_OGi = w_OI.abs().view(out_features, -1, args.group_size or in_features)
    return (w_OGi / w_OGi.amax(-1, keepdim=True).clamp_min(1e-12)).view(out_features, in_features).mean(0)


def output_error(
    w_OI: Tensor, scaled_OI: Tensor, gram_II: Tensor, args: QuantArgs, scale_I: Tensor | None = None
) -> float:
    """tr(ΔW G ΔWᵀ) of rounding `scaled_OI` to plain ranges and undoing the scales."""
    scale, zero = minmax_qparams(scaled_OI, args)
    w_OGi = scaled_OI.view(scaled_OI.shape[0], scale.shape[-1], -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    rounded_OI = (quantize(w_OGi, scale.unsqueeze(-1), shift, args) - shift).mul_(scale.unsqueeze(-1)).view_as(w_OI)
    delta_OI = (rounded_OI if scale_I is None else rounded_OI / scale_I) - w_OI
    return float(((delta_OI @ gram_II) * delta_OI).sum(dtype=torch.float64))
