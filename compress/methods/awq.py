"""AWQ: scale up the input channels that matter, so that rounding hurts them less, and scale down what feeds them.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv:2306.00978.
Before rounding, column i of the weights is multiplied by s_i and the layer in front (a norm, or the linear whose
output is read) divided by it: nothing changes but the rounding. The scales come from the grid of section 3.2,

    s = x^r              x_i: how large input channel i is,
    s = x^r / w^(1-r)    w_i: the mean of |W| in column i, each group relative to its largest weight,

for r in [0, 1]; s = 1 is in the grid, so the choice is never worse than none by its own measure. That measure is the
layer's output error tr(ΔW G ΔWᵀ) with G the Gram matrix of its inputs, ΔW = Q(W s) / s − W: the search needs no
forward pass. A sample of the rows chooses a few finalists, and most or all rows among these. For x_i the paper takes
the mean of |x_i|; here it is the root of the mean square, which is G's diagonal. Groups of weights that read one input
share their scales, as they must. In place of the paper's clipping stands `scale_search`: of each group the range of
least error, by the Gram matrix of its columns.

Left out: the paper's loss on the output of all of attention or of the MLP, which costs a forward pass for each
candidate. It was tried (SmolLM2-135M, 4 bits in groups of 64): after the whole model the KL divergence was 0.216, with
the measure above 0.196.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.methods.base import Method, StepConfig
from compress.methods.rounding import output_loss, round_to_nearest, solve_together
from compress.methods.scale_search import minmax_qparams
from compress.numerics import QuantizedWeight, quantize
from compress.schemes import QuantArgs, Scheme

_FLOOR = 1e-4  # the least scale; a channel that is always zero would get none
_ROWS = 128  # of the weights, evenly spread, by which the candidates are judged first
_FINAL_ROWS, _FINALISTS = 1024, 4  # the best of these are judged again by more


class AwqConfig(StepConfig):
    """AWQ's keys in a recipe.

    Attributes:
        scheme: how the weights are coded then; null when a later step codes them.
        grid: values of r between 0 and 1.
        duo_scaling: whether weights take part in the scales: false, true or "both" (all candidates of the two).
        scale_search: choose group ranges by weighted error rather than the plain minimum and maximum.
    """

    method: Literal["awq"] = "awq"
    scheme: str | Scheme | None = None
    grid: int = Field(default=20, ge=1, le=1000)
    duo_scaling: bool | Literal["both"] = "both"
    scale_search: bool = True


@dataclass(frozen=True)
class Choice:
    """The scales that were chosen, float32 [C], and the loss with them and without any."""

    scale_C: Tensor
    loss: float
    loss_without: float
    name: str


@dataclass(frozen=True)
class Readers:
    """How the C channels of an input are read as I columns: `mean` from columns to channels, `expand` back."""

    mean: Callable[[Tensor], Tensor]
    expand: Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def search_scale(
    w_OI: Tensor, gram_II: Tensor, args: QuantArgs, config: AwqConfig, readers: Readers | None = None
) -> Choice:
    """Scales of the input channels with the least output error after rounding.

    Args:
        w_OI: float32 weights, all that read the input, stacked along their rows.
        gram_II: float32 XᵀX / N of the input.
        args: how the weights will be coded.
        readers: where columns share channels (value heads under grouped queries); by default each is its own.
    Raises:
        ValueError: weights or inputs are not finite.
    """
    readers = readers or Readers(_same, _same)
    x_C = readers.mean(gram_II.diagonal()).clamp_min(0).sqrt()
    w_C = readers.mean(relative_magnitude(w_OI, args))
    scales = {"none": torch.ones_like(x_C)}
    for with_weights in {"both": (False, True), True: (True,), False: (False,)}[config.duo_scaling]:
        for ratio in torch.linspace(0, 1, config.grid + 1).tolist():
            name = f"r = {ratio:.2f}{' with weights' if with_weights else ''}"
            scales[name] = candidate(x_C, w_C, ratio, with_weights)

    def losses(names: Iterable[str], rows: int) -> dict[str, float]:
        w_RI = w_OI[torch.linspace(0, len(w_OI) - 1, min(rows, len(w_OI))).long()]
        expanded = {name: readers.expand(scales[name]) for name in names}
        return {name: output_error(w_RI, w_RI * s_I, gram_II, args, s_I) for name, s_I in expanded.items()}

    first = losses(scales, _ROWS)
    finalists = sorted((name for name in first if math.isfinite(first[name])), key=first.__getitem__)[:_FINALISTS]
    final = losses(dict.fromkeys(("none", *finalists)), _FINAL_ROWS)
    if not math.isfinite(final["none"]):
        raise ValueError("the weights or their inputs hold values that are not finite")
    best = min((name for name in final if math.isfinite(final[name])), key=final.__getitem__)
    return Choice(scales[best], final[best], final["none"], best)


def candidate(x_C: Tensor, w_C: Tensor, ratio: float, with_weights: bool) -> Tensor:
    """One scale vector of the grid, normalised so that its largest and smallest balance; dead channels keep theirs."""
    scale_C = x_C.pow(ratio)
    if with_weights:
        scale_C = scale_C / (w_C.pow(1 - ratio) + _FLOOR)
    scale_C = scale_C.clamp_min(_FLOOR)
    live_C = x_C > 0
    balance = (scale_C[live_C].max() * scale_C[live_C].min()).sqrt() if bool(live_C.any()) else 1.0
    return torch.where(live_C, scale_C / balance, torch.ones_like(scale_C))


def relative_magnitude(w_OI: Tensor, args: QuantArgs) -> Tensor:
    """Mean over the rows of |W|, each group relative to its largest weight, float32 [I]."""
    out_features, in_features = w_OI.shape
    w_OGi = w_OI.abs().view(out_features, -1, args.span(in_features))
    return (w_OGi / w_OGi.amax(-1, keepdim=True).clamp_min(1e-12)).view(out_features, in_features).mean(0)


def output_error(w_OI: Tensor, scaled_OI: Tensor, gram_II: Tensor, args: QuantArgs, scale_I: Tensor) -> float:
    """tr(ΔW G ΔWᵀ) of rounding `scaled_OI` to plain ranges and undoing the scales."""
    scale, zero = minmax_qparams(scaled_OI, args)
    w_OGi = scaled_OI.view(scaled_OI.shape[0], scale.shape[-1], -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    rounded_OI = (quantize(w_OGi, scale.unsqueeze(-1), shift, args) - shift).mul_(scale.unsqueeze(-1)).view_as(w_OI)
    return output_loss(rounded_OI / scale_I - w_OI, gram_II)


def smooth(block: Any, names: list[str], statistics: Any, config: AwqConfig) -> None:
    """Chooses and applies the scales of an input, where something in front of it can be divided by them.

    Where the weights that read it differ in scheme, those of the fewest bits choose.
    """
    pair = block.pair_into(names)
    if pair is None:
        return
    found = block.channels(pair)
    targets = block.targets(pair)
    args = min((block.schemes[name].weights for name in targets), key=lambda args: args.num_bits)
    w_OI = torch.cat([block.weight(name) for name in targets if block.schemes[name].weights == args])
    readers = Readers(lambda x_I: found.shared(x_I, "mean"), found.expand)
    choice = search_scale(w_OI, statistics.gram.matrix(), args, config, readers)
    block.record.setdefault("smoothing", {})["+".join(targets)] = {
        "chosen": choice.name, "loss": choice.loss, "without": choice.loss_without,
    }  # fmt: skip
    if choice.loss < choice.loss_without:
        block.scale_channels(pair, choice.scale_C, statistics)


def solve(w_OI: Tensor, gram_II: Tensor, args: QuantArgs, config: AwqConfig) -> QuantizedWeight:
    """Nearest codes of a weight that is scaled already. See `round_to_nearest`."""
    return round_to_nearest(w_OI, gram_II, args, config.scale_search)


def step(block: Any, rows: dict[str, Scheme], config: AwqConfig) -> None:
    """Rounds the block's weights, those that read the same input together; `smooth` has scaled them."""
    solve_together(block, rows, partial(solve, config=config))


AWQ = Method(
    name="awq",
    paper="Lin et al., AWQ, arXiv:2306.00978",
    config=AwqConfig,
    statistics="gram",
    kind="block",
    step=step,
    smooth=smooth,
)
