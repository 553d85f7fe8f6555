"""Round to nearest: each weight to its closest code, no data. The baseline of every other method.

With `scale_search` the group ranges are those of least squared error; the default is the plain range.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from compress.methods.base import Method, StepConfig
from compress.methods.rounding import round_to_nearest
from compress.numerics import QuantizedWeight
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
    """Nearest codes of a float32 weight; `gram_II` is not used and may be None. See `round_to_nearest`."""
    del gram_II
    return round_to_nearest(w_OI, None, args, config.scale_search)


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
