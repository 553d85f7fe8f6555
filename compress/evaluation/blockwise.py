"""How likely a model that is larger than memory finds continuations: all requests through one block before the next.

Context and continuation go through together, those of like length side by side and padded on the right, where a
causal model does not look. Hidden states between two blocks lie in a file that every block writes over, so memory is
one block and one batch, whatever the model and however many requests. Results are those of `likelihood` but for the
order of sums.

Left out: sharing a context among its continuations, which `likelihood` does and which here costs up to twice as much;
resuming.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.calibration.chain import Chain
from compress.calibration.walk import BATCH_TOKENS
from compress.errors import CompressError
from compress.evaluation.likelihood import LOGITS, Score, Tokens, gather
from compress.models.frame import Call, output_of
from compress.models.load import StreamedModel

_FLOAT_BYTES = 4


def score_blockwise(
    model: StreamedModel,
    requests: Sequence[tuple[Tokens, Tokens]],
    *,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Scores (context, continuation) pairs, both at least one token long, in their order.

    Args:
        folder: where the file of hidden states lies meanwhile.
        progress: called with blocks done and blocks in all, the head counted as one.

    Raises:
        CompressError: the disk has no room for the hidden states.
    """
    batches = _batches([(*context, *continuation)[:-1] for context, continuation in requests])
    places = {tokens: (b, row) for b, batch in enumerate(batches) for row, tokens in enumerate(batch)}
    wanted: list[list[tuple[int, int]]] = [[] for _ in batches]  # of each batch: request, row
    for i, (context, continuation) in enumerate(requests):
        b, row = places[(*context, *continuation)[:-1]]
        wanted[b].append((i, row))
    found: dict[int, Score] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hidden-", dir=folder) as work:
        hidden = _through_blocks(model, batches, Path(work), progress)
        head = model.head()
        for b, asked in enumerate(wanted):
            found |= _scores(head, hidden(b), [(i, row, *requests[i]) for i, row in asked])
    if progress:
        progress(model.block_count + 1, model.block_count + 1)
    return [found[i] for i in range(len(requests))]


def _batches(sequences: Sequence[Tokens]) -> list[list[Tokens]]:
    """Different sequences, the longest first, as many together as make `BATCH_TOKENS` with their padding."""
    batches: list[list[Tokens]] = []
    for tokens in sorted(set(sequences), key=lambda s: (-len(s), s)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= BATCH_TOKENS:
            batches[-1].append(tokens)
        else:
            batches.append([tokens])
    return batches


def _through_blocks(
    model: StreamedModel, batches: Sequence[Sequence[Tokens]], work: Path, progress: Callable[[int, int], None] | None
) -> Callable[[int], Tensor]:
    """A batch's number to its hidden states after the last block, float32 [B, T, D]."""
    padded = [torch.tensor([[*t, *[0] * (len(batch[0]) - len(t))] for t in batch]) for batch in batches]
    starts = [0, *torch.tensor([tokens_BT.numel() for tokens_BT in padded]).cumsum(0).tolist()]
    calls: dict[torch.Size, list[Call]] = {}  # the arguments depend on a batch's shape alone
    chain: Chain | None = None
    for start, tokens_BT, (hidden_BTD, call) in zip(starts, padded, model.embed(padded), strict=False):
        if chain is None:
            chain = _chain(work, starts[-1], hidden_BTD.shape[-1])
        chain.fill(start, hidden_BTD.flatten(0, 1).unsqueeze(1))
        calls.setdefault(tokens_BT.shape, call)
    assert chain is not None, "there are requests"

    def hidden(b: int) -> Tensor:
        return chain.read(starts[b], starts[b + 1]).view(*padded[b].shape, -1)

    for index in range(model.block_count):
        block = model.block(index)
        with torch.no_grad():
            for b, tokens_BT in enumerate(padded):
                out_BTD = output_of(block(hidden(b), **calls[tokens_BT.shape][index]))
                chain.fill(starts[b], out_BTD.flatten(0, 1).unsqueeze(1))
        if progress:
            progress(index + 1, model.block_count + 1)
    return hidden


def _chain(work: Path, tokens: int, width: int) -> Chain:
    """The file of hidden states, a row for each token."""
    size, free = tokens * width * _FLOAT_BYTES, shutil.disk_usage(work).free
    if size > free:
        raise CompressError(
            f"the hidden states of the questions take {size:,} bytes, and {free:,} are free", where=str(work.parent),
            hint="free some, or name another place by COMPRESS_CACHE",
        )  # fmt: skip
    return Chain(work / "states", (tokens, 1, width), torch.float32)


def _scores(
    head: Callable[[Tensor], Tensor], hidden_BTD: Tensor, asked: Sequence[tuple[int, int, Tokens, Tokens]]
) -> dict[int, Score]:
    """Scores of a batch's requests by their numbers; `asked` holds number, row, context and continuation of each."""
    rows, columns, targets, owners = [list[int]() for _ in range(4)]
    for n, (_, row, context, continuation) in enumerate(asked):
        rows += [row] * len(continuation)
        columns += range(len(context) - 1, len(context) - 1 + len(continuation))
        targets += continuation
        owners += [n] * len(continuation)
    hidden_PD, target_P, owner_P = hidden_BTD[rows, columns], torch.tensor(targets), torch.tensor(owners)
    size = max(1, LOGITS // head(hidden_PD[None, :1]).shape[-1])
    parts = [
        gather(
            head(hidden_pD[None])[0].unsqueeze(1), target_p.unsqueeze(1), torch.ones(len(target_p), 1, dtype=torch.bool)
        )
        for hidden_pD, target_p in zip(torch.split(hidden_PD, size), torch.split(target_P, size), strict=True)
    ]
    logprob_P, greedy_P = (torch.cat(same) for same in zip(*parts, strict=True))
    logprob_R = torch.zeros(len(asked), dtype=torch.float64).index_add(0, owner_P, logprob_P)
    misses_R = torch.zeros(len(asked)).index_add(0, owner_P, (~greedy_P).float())
    return {i: Score(float(logprob_R[n]), bool(misses_R[n] == 0)) for n, (i, *_) in enumerate(asked)}
