"""SmoothQuant: move the outliers of activations into the weights, so that both can be rounded to 8 bits.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv:2211.10438. A norm's output channel j is divided by

    s_j = max|X_j|^α / max|W_j|^(1-α)           (eq. 4)

and column j of the linears that read it multiplied. α = 0.5 shares the difficulty between the two. With `alpha: auto`
each layer takes the α whose rounded inputs and rounded weights together cost its output least, by statistics alone: an
input is rounded in steps of about max_j(max|X_j| / s_j) / 127, which errs by a twelfth of the step's square in every
channel, so the output errs by that times ‖W s‖²; the weights' own part is tr(ΔW G ΔWᵀ), from a sample of the rows.

Left out: smoothing between a linear layer and the next, as the paper leaves it out.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.methods.awq import output_error
from compress.methods.base import Method, StepConfig
from compress.schemes import QuantArgs

_FLOOR = 1e-5
_ROWS = 128  # of the weights, evenly spread, by which their own part of the cost is judged
_ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class SmoothQuantConfig(StepConfig):
    """SmoothQuant's keys in a recipe.

    Attributes:
        scheme: always null: a later step codes the weights.
        alpha: how much of the activations' range moves into the weights, 0 to 1; or "auto", by layer.
    """

    method: Literal["smoothquant"] = "smoothquant"
    scheme: None = None
    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.5


def smoothing_scale(w_OI: Tensor, largest_I: Tensor, alpha: float) -> Tensor:
    """Scales s [I] of eq. 4; a channel that is always zero keeps 1.

    Args:
        w_OI: float32 weights, all that read the input, stacked along their rows.
        largest_I: float32 largest |X| of each input channel.
    """
    w_I = w_OI.abs().amax(0)
    scale_I = largest_I.clamp_min(_FLOOR).pow(alpha) / w_I.clamp_min(_FLOOR).pow(1 - alpha)
    return torch.where((largest_I > 0) & (w_I > 0), scale_I.clamp_min(_FLOOR), torch.ones_like(scale_I))


def cost(w_OI: Tensor, gram_II: Tensor, largest_I: Tensor, scale_I: Tensor, args: QuantArgs) -> float:
    """The output error of rounding both scaled inputs and scaled weights to 8 bits, estimated."""
    step = float((largest_I / scale_I).max()) / 127
    scaled_OI = w_OI * scale_I
    inputs = step**2 / 12 * float(scaled_OI.square().sum(dtype=torch.float64))
    sample = torch.linspace(0, len(w_OI) - 1, min(_ROWS, len(w_OI))).long()
    weights = output_error(w_OI[sample], scaled_OI[sample], gram_II, args, scale_I)
    return inputs + weights * len(w_OI) / len(sample)


def smooth(block: Any, names: list[str], statistics: Any, config: SmoothQuantConfig) -> None:
    """Scales an input that a norm makes."""
    pair = block.pair_into(names)
    if pair is None or not pair.from_norm:
        return
    targets = block.targets(pair)
    w_OI = torch.cat([block.weight(name) for name in targets])
    largest_I = statistics.largest_I
    if not bool(largest_I.isfinite().all()):
        raise ValueError("the inputs hold values that are not finite")
    if config.alpha == "auto":
        args, gram_II = block.schemes[targets[0]].weights, statistics.gram.matrix()
        costs = {a: cost(w_OI, gram_II, largest_I, smoothing_scale(w_OI, largest_I, a), args) for a in _ALPHAS}
        alpha = min(costs, key=costs.__getitem__)
        without = cost(w_OI, gram_II, largest_I, torch.ones_like(largest_I), args)
        searched = {"loss": costs[alpha], "without": without}
    else:
        alpha, searched = config.alpha, {}
    block.record.setdefault("smoothing", {})["+".join(targets)] = {"chosen": f"alpha = {alpha:.2f}", **searched}
    block.scale_channels(pair, smoothing_scale(w_OI, largest_I, alpha), statistics)


SMOOTHQUANT = Method(
    name="smoothquant",
    paper="Xiao et al., SmoothQuant, arXiv:2211.10438",
    config=SmoothQuantConfig,
    statistics="absmax",
    kind="smooth",
    step=None,
    smooth=smooth,
)
