"""Runs tokens through a model of which only a block is in memory, and nothing else: no hooks, no statistics."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.calibration.walk import BATCH_TOKENS, cast_calls
from compress.models.frame import output_of
from compress.models.load import StreamedModel


def stream(
    model: StreamedModel,
    tokens_NT: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
    visit: Callable[[int, Tensor], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Hidden states after the last block, [N, T, D] in `dtype`.

    Args:
        tokens_NT: int64 windows of one length.
        dtype: in which blocks compute and hidden states are handed on.
        batch: windows that go through a block at a time; by default as many as make 2,048 tokens.
        visit: called with a block's index and its outputs [N, T, D].
        progress: called with blocks done and blocks in all.
    """
    size = batch or max(1, BATCH_TOKENS // tokens_NT.shape[1])
    batches = list(model.embed(torch.split(tokens_NT, size)))
    hidden_NTD = torch.cat([hidden for hidden, _ in batches]).to(dtype)
    calls = [cast_calls(call, dtype) for _, call in batches]
    del batches
    for index in range(model.block_count):
        block = model.block(index).to(dtype)
        with torch.no_grad():
            for rows_BTD, call in zip(torch.split(hidden_NTD, size), calls, strict=True):
                rows_BTD.copy_(output_of(block(rows_BTD, **call[index])))
        if visit:
            visit(index, hidden_NTD)
        if progress:
            progress(index + 1, model.block_count)
    return hidden_NTD
