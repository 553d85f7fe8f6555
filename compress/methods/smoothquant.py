"""SmoothQuant: move the outliers of activations into the weights, so that both can be rounded to 8 bits.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv:2211.10438. A norm's output channel j is divided by

    s_j = max|X_j|^α / max|W_j|^(1-α)           (eq. 4)

and column j of the linears that read it multiplied. α = 0.5 shares the difficulty; with `alpha: auto` each layer
takes the α whose rounded weights and rounded activations together cost its output least.

That cost is estimated from statistics alone. A per-token scale makes an activation's rounding error about uniform,
its variance the square of the token's step over 12, whatever the channel: with Δ² the mean over tokens of the squared
step, the output error is Δ²/12 · ‖W s‖² for the activations and tr(ΔW G ΔWᵀ) for the weights.

Left out: smoothing in front of layers that read no norm (as the paper).
"""

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

_FLOOR = 1e-5


class SmoothQuantConfig(BaseModel):
    """SmoothQuant's keys in a recipe.

    Attributes:
        alpha: how much of the activations' range moves into the weights, 0 to 1; or "auto", by layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["smoothquant"] = "smoothquant"
    alpha: float | Literal["auto"] = Field(default=0.5)


def smoothing_scale(w_OI: Tensor, absmax_I: Tensor, alpha: float) -> Tensor:
    """Scales s [I] of eq. 4; a channel that is always zero keeps 1.

    Args:
        w_OI: float32 weights, all that read the input, stacked along their rows.
        absmax_I: float32 largest |X| of each input channel.
    """
    w_I = w_OI.abs().amax(0)
    scale_I = absmax_I.clamp_min(_FLOOR).pow(alpha) / w_I.clamp_min(_FLOOR).pow(1 - alpha)
    return torch.where((absmax_I > 0) & (w_I > 0), scale_I.clamp_min(_FLOOR), torch.ones_like(scale_I))
