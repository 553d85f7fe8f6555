"""Round to nearest: each weight to its closest code, no data. The baseline of every other method.

With `scale_search` the group ranges are those of least squared error; the default is the plain range.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from compress.methods.base import Method, StepConfig
from compress.methods.scale_search import minmax_qparams, search_qparams
from compress.numerics import QuantizedWeight, code_dtype, quantize, tensor_scale
from compress.schemes import QuantArgs, Scheme


class RtnConfig(StepConfig):
    """Round-to-nearest's keys in a recipe.

    Attributes:
        scale_search: choose group ranges by squared error rather than the plain minimum and maximum.
    """

    method: Literal["rtn"] = "rtn"
    scheme: str | Scheme
    scale_search: bool = False


def solve(w_OI: Tensor, gram_II: Tensor | None, args: QuantArgs, config: RtnConfig) -> QuantizedWeight:
    """Nearest codes of a float32 weight; `gram_II` is not used and may be None.

    Any strategy; the rows of a stacked weight must be cut where blocks end.

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
    w_OGi = w_OI.view(w_OI.shape[0], scale.shape[-1], -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    q_OGi = quantize(w_OGi, scale.unsqueeze(-1), shift, args)
    loss = float(((q_OGi - shift) * scale.unsqueeze(-1) - w_OGi).square().sum())
    q_OI = q_OGi.to(code_dtype(args)).view(w_OI.shape)
    return QuantizedWeight(q_OI, scale, zero, loss, global_scale=tensor_scale(w_OI, args))


def step(block: Any, rows: dict[str, Scheme], config: RtnConfig) -> None:
    """Rounds every weight of the block that has a row; those that read the same input share a scale of a tensor."""
    for weights in block.in_order():
        for scheme in dict.fromkeys(rows[name] for name in weights):
            names = [name for name in weights if rows[name] == scheme]
            shared = scheme.weights.strategy in ("tensor", "tensor_group")
            for part in [names] if shared else [[name] for name in names]:
                stacked_OI = torch.cat([block.weight(name) for name in part])
                block.set(part, solve(stacked_OI, None, scheme.weights, config))


RTN = Method(
    name="rtn",
    paper="round to nearest, the baseline",
    config=RtnConfig,
    statistics=None,
    kind="block",
    step=step,
)
