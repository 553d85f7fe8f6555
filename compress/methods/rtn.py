"""Round to nearest: each weight to its closest code, no data. The baseline of every other method.

With `scale_search` the group ranges are those of least squared error; the default is the plain range.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from compress.methods.base import Method, StepConfig
from compress.methods.scale_search import minmax_qparams, search_qparams
from compress.numerics import QuantizedWeight, quantize
from compress.schemes import QuantArgs, Scheme


class RtnConfig(StepConfig):
    """Round-to-nearest's keys in a recipe.

    Attributes:
        scale_search: choose group ranges by squared error rather than the plain minimum and maximum.
    """

    method: Literal["rtn"] = "rtn"
    scale_search: bool = False


def solve(w_OI: Tensor, gram_II: Tensor | None, args: QuantArgs, config: RtnConfig) -> QuantizedWeight:
    """Nearest codes of a float32 weight; `gram_II` is not used and may be None.

    Raises:
        ValueError: the weights are not finite.
    """
    del gram_II
    if not bool(torch.isfinite(w_OI).all()):
        raise ValueError("the weights hold values that are not finite")
    if config.scale_search:
        scale, zero = search_qparams(w_OI, torch.ones(w_OI.shape[1]), args)
    else:
        scale, zero = minmax_qparams(w_OI, args)
    groups = scale.shape[-1]
    w_OGi = w_OI.view(w_OI.shape[0], groups, -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    q_OGi = quantize(w_OGi, scale.unsqueeze(-1), shift, args)
    loss = float(((q_OGi - shift) * scale.unsqueeze(-1) - w_OGi).square().sum())
    return QuantizedWeight(q_OGi.to(torch.int8).view(w_OI.shape), scale, zero, loss)


def step(block: Any, rows: dict[str, Scheme], config: RtnConfig) -> None:
    """Rounds every weight of the block that has a row."""
    for name, scheme in rows.items():
        block.set([name], solve(block.weight(name), None, scheme.weights, config))


RTN = Method(
    name="rtn",
    paper="round to nearest, the baseline",
    config=RtnConfig,
    statistics=None,
    kind="block",
    step=step,
)
