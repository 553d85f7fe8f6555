"""The model around its blocks: its own forward with every block replaced by one that records and passes on.

What a family does before its first block and after its last (positions, masks, rotary embeddings, scaled or capped
logits) is left to the family's own code, so that none of it is imitated.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.family import ModelFamily

Call = dict[str, Any]  # a block's keyword arguments


def inner_name(family: ModelFamily) -> str:
    """The module that holds the blocks."""
    return family.blocks.rsplit(".", 1)[0]


def output_of(returned: Any) -> Tensor:
    """The hidden states among what a block returned: some families return a tuple."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


def replaced(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A module with other children than the original, which keeps its own."""
    made = copy.copy(module)
    made._modules = {**module._modules, **parts}
    return made


def run_frame(
    skeleton: nn.Module,
    family: ModelFamily,
    parts: Mapping[str, nn.Module],
    rows_BT: Tensor,
    see: Callable[[Tensor, Call], Any],
) -> Tensor:
    """Runs the decoder around its blocks; what it returns [B, T, D].

    Args:
        parts: children, with weights, in place of the skeleton's.
        rows_BT: rows of the embedding among them.
        see: called in place of each block with hidden states and keyword arguments; returns what a block would.
    """
    blocks: Any = skeleton.get_submodule(family.blocks)
    stubs = nn.ModuleList(_Stub(block, see) for block in blocks)
    inner = replaced(skeleton.get_submodule(inner_name(family)), {**parts, family.blocks.rsplit(".", 1)[1]: stubs})
    with torch.no_grad():
        hidden_BTD: Tensor = inner(input_ids=rows_BT, use_cache=False)[0]
    return hidden_BTD


class _Stub(nn.Module):
    """Stands in for a block."""

    def __init__(self, block: nn.Module, see: Callable[[Tensor, Call], Any]) -> None:
        super().__init__()
        self.__dict__.update(_block=block, _see=see)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Positional arguments get the names that the block's own forward gives them."""
        names = list(inspect.signature(self.__dict__["_block"].forward).parameters)[1:]
        return self.__dict__["_see"](hidden_BTD, {**dict(zip(names, args, strict=False)), **kwargs})


class Head(nn.Module):
    """The causal model with its decoder replaced by "the hidden states are these".

    Called with hidden states [B, T, D] after the last block; returns logits float32 [B, T, V].
    """

    def __init__(self, skeleton: nn.Module, family: ModelFamily, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        decoded = _Decoded()
        part: nn.Module = decoded
        path = inner_name(family).split(".")
        for depth in range(len(path) - 1, 0, -1):
            part = replaced(skeleton.get_submodule(".".join(path[:depth])), {path[depth]: part})
        self.__dict__.update(_decoded=decoded, _whole=replaced(skeleton, {path[0]: part, family.head: projection}))

    @torch.no_grad()
    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """The logits that the model makes of these."""
        self.__dict__["_decoded"].hidden_BTD = self.norm(hidden_BTD)
        logits: Tensor = self.__dict__["_whole"](input_ids=torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64)).logits
        return logits.float()


class _Decoded(nn.Module):
    """A decoder whose output is already known."""

    hidden_BTD: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever it is asked, the answer is ready."""
        del args, kwargs
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden_BTD)
