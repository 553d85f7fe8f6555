"""How likely a model finds a continuation after a context: what multiple-choice accuracy is made of.

The choices of a question share its context, so the context is computed once: contexts go through the model together,
without padding, and every choice goes on from its context's cache. A pass reads all weights, and is worth many tokens.
So contexts of about one length are cut to the shortest of them, and what is cut off goes on in front of each of its
choices; and choices of like length are padded on the right, where a causal model does not look, while the longer ones
go on without those that have ended. Long continuations (whole pages) go on piece by piece, so that the logits of only a
few positions exist at a time.

Left out: generation; images.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.runtimes.base import Runtime

Tokens = tuple[int, ...]
WINDOW = 2048  # the longest context that is scored at once; rolling windows have this length
_PREFILL_TOKENS = 2048  # tokens of contexts that go through the model together
LOGITS = 1 << 25  # logits that exist at a time
_PASS = 24  # tokens that take as long as reading the weights once


@dataclass(frozen=True)
class Score:
    """Sum of the continuation's log-probabilities, in nats, and whether each token was the most likely one."""

    logprob: float
    greedy: bool


def score(
    runtime: Runtime,
    requests: Sequence[tuple[Tokens, Tokens]],
    *,
    vocab_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Scores (context, continuation) pairs, both at least one token long, in their order."""
    assert all(context and continuation for context, continuation in requests)
    by_context: dict[Tokens, dict[Tokens, None]] = {}
    for context, continuation in requests:
        by_context.setdefault(context, {})[continuation] = None
    known: dict[tuple[Tokens, Tokens], Score] = {}
    total = sum(map(len, by_context.values()))
    for contexts in _batches(by_context, max(1, LOGITS // vocab_size)):
        pairs = [(row, c) for row, context in enumerate(contexts) for c in by_context[context]]
        found = _score_batch(runtime, contexts, pairs, vocab_size)
        known |= {(contexts[row], c): s for (row, c), s in zip(pairs, found, strict=True)}
        if progress:
            progress(len(known), total)
    return [known[request] for request in requests]


def _batches(by_context: Mapping[Tokens, Iterable[Tokens]], most: int) -> list[list[Tokens]]:
    """Contexts, the longest first: what does not fit in memory fails at once.

    A batch's continuations, with what is cut off in front of them and padding, have at most `most` tokens, unless one
    context's alone have more. Each further length in a batch saves two passes, and may cost as many tokens.
    """
    batches: list[list[Tokens]] = []
    for context in sorted(by_context, key=lambda c: (-len(c), c)):
        batch = [*batches[-1], context] if batches else [context]
        ends = [(len(c) - len(context), [len(k) for k in by_context[c]]) for c in batch]
        rows, longest = sum(len(lengths) for _, lengths in ends), max(cut + max(lengths) for cut, lengths in ends)
        twice = sum(cut * len(lengths) for cut, lengths in ends)
        saved = 2 * _PASS * (len({cut for cut, _ in ends}) - 1)
        if batches and twice <= saved and rows * longest <= most and len(batch) * len(context) <= _PREFILL_TOKENS:
            batches[-1] = batch
        else:
            batches.append([context])
    return batches


def _score_batch(
    runtime: Runtime, contexts: list[Tokens], pairs: list[tuple[int, Tokens]], vocab_size: int
) -> list[Score]:
    """Scores continuations of `pairs` (row of its context, tokens) after contexts, the shortest last."""
    shared = len(contexts[-1])
    rows_R = torch.tensor([row for row, _ in pairs])
    ends = [(contexts[row][shared:], continuation) for row, continuation in pairs]
    longest = max(len(cut) + len(continuation) for cut, continuation in ends)
    targets_RT = torch.zeros(len(pairs), longest, dtype=torch.int64)
    counts_RT = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for r, (cut, continuation) in enumerate(ends):
        end = len(cut) + len(continuation)
        targets_RT[r, :end] = torch.tensor((*cut, *continuation))
        counts_RT[r, len(cut) : end] = True
    first_BV = runtime.prefill(torch.tensor([context[:shared] for context in contexts]))
    logprob_R, greedy_R = gather(first_BV[rows_R].unsqueeze(1), targets_RT[:, :1], counts_RT[:, :1])
    follows_R = torch.tensor([len(cut) + len(continuation) - 1 for cut, continuation in ends])
    before_r = None
    for start, end in _spans(follows_R.tolist(), LOGITS // vocab_size):
        on_r = (follows_R > start).nonzero().squeeze(1)
        logits_rTV = runtime.follow(
            rows_R[on_r] if before_r is None else torch.searchsorted(before_r, on_r), targets_RT[on_r, start:end]
        )
        before_r, span = on_r, slice(start + 1, end + 1)
        more_r, same_r = gather(logits_rTV, targets_RT[on_r, span], counts_RT[on_r, span])
        logprob_R.index_add_(0, on_r, more_r)
        greedy_R[on_r] &= same_r
    return [Score(float(p), bool(g)) for p, g in zip(logprob_R, greedy_R, strict=True)]


def _spans(follows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Stretches of positions [start, end) that go through the model together, so that it costs least.

    A stretch takes a pass, and a token of every row that is longer than its start; at most `most` tokens, where it has
    more than one position.
    """
    ends = sorted({0, *follows})
    cost, chosen = [0] * len(ends), [0] * len(ends)
    for i in range(len(ends) - 2, -1, -1):
        rows = sum(n > ends[i] for n in follows)
        cost[i], chosen[i] = min(
            (rows * (ends[j] - ends[i]) + _PASS + cost[j], j) for j in range(i + 1, len(ends))
        )  # fmt: skip
    found, i = list[tuple[int, int]](), 0
    while i < len(ends) - 1:
        step = max(1, most // sum(n > ends[i] for n in follows))
        stop = ends[chosen[i]]
        found += [(start, min(start + step, stop)) for start in range(ends[i], stop, step)]
        i = chosen[i]
    return found


def gather(logits_RTV: Tensor, targets_RT: Tensor, counts_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Of targets that count, the sum of log-probabilities [R], and whether all are the most likely [R]."""
    logits_RTV = logits_RTV.float()
    chosen_RT = logits_RTV.gather(-1, targets_RT.unsqueeze(-1)).squeeze(-1) - logits_RTV.logsumexp(-1)
    same_RT = logits_RTV.argmax(-1) == targets_RT
    return (chosen_RT.double() * counts_RT).sum(-1), (same_RT | ~counts_RT).all(-1)
