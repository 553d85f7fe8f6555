"""Runs tokens through a model of which only a block is in memory, and nothing else: no hooks, no statistics."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.calibration.walk import BATCH_TOKENS
from compress.models.frame import output_of
from compress.models.load import StreamedModel


def stream(
    model: StreamedModel,
    tokens_NT: Tensor,
    *,
    visit: Callable[[int, Tensor], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Hidden states after the last block, float32 [N, T, D].

    Args:
        tokens_NT: int64 windows of one length.
        visit: called with a block's index and its outputs [N, T, D].
        progress: called with blocks done and blocks in all.
    """
    size = max(1, BATCH_TOKENS // tokens_NT.shape[1])
    batches = list(model.embed(tokens_NT, size))
    hidden_NTD = torch.cat([hidden for hidden, _ in batches])
    calls = [call for _, call in batches]
    del batches
    for index in range(model.block_count):
        block = model.block(index)
        with torch.no_grad():
            for rows_BTD, call in zip(torch.split(hidden_NTD, size), calls, strict=True):
                rows_BTD.copy_(output_of(block(rows_BTD, **call[index])))
        if visit:
            visit(index, hidden_NTD)
        if progress:
            progress(index + 1, model.block_count)
    return hidden_NTD
