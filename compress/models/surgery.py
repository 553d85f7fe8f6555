"""Smoothing: scale channels where they are made, undo it where they are read; the model computes the same.

A pair (models/family.py) names both places. Its channels are counted once however often they are read: with
grouped queries a value head is read by several query heads, so that the targets have more input columns than
there are channels. `Channels` translates between the two. Weights are changed in place. A norm's weight is rounded to
bfloat16, as it will be stored, and the readers undo what that left of the scale: "the same" is to float rounding.

Left out: scaling through an activation that is not positively homogeneous, and anything between two blocks.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.models.family import Pair, Rows


@dataclass(frozen=True)
class Channels:
    """The C channels of a pair.

    Attributes:
        rows_C: int64, the source's output that each channel is.
        channel_I: int64, the channel that each input column of the targets reads.
    """

    rows_C: Tensor
    channel_I: Tensor

    @property
    def count(self) -> int:
        """C."""
        return len(self.rows_C)

    def shared(self, x_I: Tensor, how: Literal["max", "mean"]) -> Tensor:
        """One value a channel, [..., C], of one a column, [..., I]: the largest or the mean over its readers."""
        order_I = torch.argsort(self.channel_I, stable=True)
        x_CR = x_I[..., order_I].view(*x_I.shape[:-1], self.count, -1)
        return x_CR.amax(-1) if how == "max" else x_CR.mean(-1)

    def expand(self, x_C: Tensor) -> Tensor:
        """One value a column, [..., I], of one a channel, [..., C]."""
        return x_C[..., self.channel_I]


def channels(block: nn.Module, pair: Pair, config: Any) -> Channels:
    """The channels of a pair in a block; its weights may be on the meta device.

    Args:
        config: transformers' config of the model, for its number of heads.
    """
    columns = {_weight(block, target).shape[1] for target in pair.targets}
    assert len(columns) == 1, f"{pair.targets} read inputs of different widths"
    (width,) = columns
    source = _weight(block, pair.source)
    head = width // int(config.num_attention_heads)
    rows_C = torch.arange(width) if source.dim() == 1 else _rows(pair.rows, len(source), width, head)
    count = len(rows_C)
    assert width % count == 0, f"{pair.source} makes {count} channels, {pair.targets[0]} reads {width}"
    channel_I = torch.arange(width)
    if count < width:  # value heads, each read by width / count query heads
        channel_I = torch.arange(count).view(-1, 1, head).expand(-1, width // count, -1).flatten()
    return Channels(rows_C, channel_I)


def _rows(layout: Rows, rows: int, width: int, head: int) -> Tensor:
    """The rows of a source's weight that a layout means; `head` values a head, `width` of them after attention."""
    if layout == "all":
        return torch.arange(rows)
    if layout == "second_half":
        return torch.arange(rows // 2, rows)
    value_heads = (rows // head - width // head) // 2  # rows are queries, keys and values
    if layout == "values_last":
        return torch.arange(rows - value_heads * head, rows)
    return torch.arange(rows).view(value_heads, -1, head)[:, -1].flatten()


def fold(block: nn.Module, pair: Pair, scale_C: Tensor, config: Any) -> None:
    """Divides the source's channels by `scale_C` and multiplies the targets' columns by it, in place.

    Args:
        block: a block of a model, with weights.
        pair: of the model's family.
        scale_C: positive, one a channel.
        config: transformers' config of the model.
    """
    fold_targets(block, pair, fold_source(block, pair, scale_C, config), config)


@torch.no_grad()
def fold_source(block: nn.Module, pair: Pair, scale_C: Tensor, config: Any) -> Tensor:
    """The source's half of `fold`: its channels are divided by `scale_C` [C].

    Returns:
        The scales [C] that the source was divided by in truth. A norm's weight is stored in bfloat16 and is rounded to
        it here, so that they can be undone exactly; those of a linear source are `scale_C`.
    """
    rows_C = channels(block, pair, config).rows_C
    _check(scale_C, len(rows_C))
    weight = _weight(block, pair.source)
    if weight.dim() == 1:
        one = 1.0 if pair.plus_one else 0.0
        before_C = weight + one
        weight.copy_((before_C / scale_C.to(weight) - one).bfloat16())
        after_C = weight + one
        kept_C = (before_C != 0) & (after_C != 0)
        scale_C = torch.where(kept_C, before_C / after_C, scale_C.to(weight))
    else:
        weight[rows_C] = weight[rows_C] / scale_C.to(weight).unsqueeze(1)
    fold_bias(block, pair, scale_C, config)
    return scale_C


@torch.no_grad()
def fold_bias(block: nn.Module, pair: Pair, scale_C: Tensor, config: Any) -> None:
    """Divides the source's bias, where it has one, by `scale_C` [C]."""
    rows_C = channels(block, pair, config).rows_C
    bias = getattr(block.get_submodule(pair.source), "bias", None)
    if bias is not None:
        bias[rows_C] = bias[rows_C] / scale_C.to(bias)


@torch.no_grad()
def fold_targets(block: nn.Module, pair: Pair, scale_C: Tensor, config: Any) -> None:
    """The targets' half of `fold`: the columns that read a channel are multiplied by its `scale_C` [C]."""
    found = channels(block, pair, config)
    _check(scale_C, found.count)
    for target in pair.targets:
        weight_OI = _weight(block, target)
        weight_OI.mul_(found.expand(scale_C).to(weight_OI))


def _check(scale_C: Tensor, count: int) -> None:
    assert scale_C.shape == (count,), f"{tuple(scale_C.shape)} scales for {count} channels"
    assert bool((scale_C.isfinite() & (scale_C > 0)).all()), "scales are finite and positive"


def _weight(block: nn.Module, name: str) -> Tensor:
    weight = block.get_submodule(name).weight
    assert isinstance(weight, Tensor), f"{name} has no weight"
    return weight.data
