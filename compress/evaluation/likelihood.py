"""How likely a model finds a continuation after a context: what multiple-choice accuracy is made of.

The choices of a question share its context, so the context is computed once: contexts of one length go through
the model together, without padding, and every choice goes on from its context's cache. Choices are padded on
the right, where a causal model does not look. Long continuations (whole pages) go on piece by piece, so that
the logits of only a few positions exist at a time.

Left out: generation; images.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.runtimes.hf import Runtime

Tokens = tuple[int, ...]
WINDOW = 2048  # the longest context that is scored at once; rolling windows have this length
_PREFILL_TOKENS = 2048  # tokens of contexts that go through the model together
LOGITS = 1 << 25  # logits that exist at a time


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
    """Contexts of one length, the longest first: what does not fit in memory fails at once.

    A batch's continuations, padded, have at most `most` tokens, unless one context's alone have more.
    """
    batches: list[list[Tokens]] = []
    rows = longest = 0
    for context in sorted(by_context, key=lambda c: (-len(c), c)):
        lengths = [len(continuation) for continuation in by_context[context]]
        same = bool(batches) and len(batches[-1][0]) == len(context)
        fits = (rows + len(lengths)) * max(longest, *lengths) <= most
        if same and fits and (len(batches[-1]) + 1) * len(context) <= _PREFILL_TOKENS:
            batches[-1].append(context)
            rows, longest = rows + len(lengths), max(longest, *lengths)
        else:
            batches.append([context])
            rows, longest = len(lengths), max(lengths)
    return batches


def _score_batch(
    runtime: Runtime, contexts: list[Tokens], pairs: list[tuple[int, Tokens]], vocab_size: int
) -> list[Score]:
    """Scores continuations of `pairs` (row of its context, tokens) after contexts of one length."""
    rows_R = torch.tensor([row for row, _ in pairs])
    lengths_R = torch.tensor([len(c) for _, c in pairs])
    longest = int(lengths_R.max())
    targets_RT = torch.tensor([[*c, *[0] * (longest - len(c))] for _, c in pairs])
    first_BV = runtime.prefill(torch.tensor(contexts))
    logprob_R, greedy_R = gather(first_BV[rows_R].unsqueeze(1), targets_RT[:, :1], lengths_R)
    step = max(1, LOGITS // (vocab_size * len(pairs)))
    for start in range(0, longest - 1, step):
        end = min(start + step, longest - 1)
        logits_RTV = runtime.follow(None if start else rows_R, targets_RT[:, start:end])
        more_R, same_R = gather(logits_RTV, targets_RT[:, start + 1 : end + 1], lengths_R - start - 1)
        logprob_R, greedy_R = logprob_R + more_R, greedy_R & same_R
    return [Score(float(p), bool(g)) for p, g in zip(logprob_R, greedy_R, strict=True)]


def gather(logits_RTV: Tensor, targets_RT: Tensor, lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the targets' log-probabilities, and whether all are the most likely; `lengths_R` of each row count."""
    counts_RT = torch.arange(targets_RT.shape[1]) < lengths_R.unsqueeze(1)
    logits_RTV = logits_RTV.float()
    chosen_RT = logits_RTV.gather(-1, targets_RT.unsqueeze(-1)).squeeze(-1) - logits_RTV.logsumexp(-1)
    same_RT = logits_RTV.argmax(-1) == targets_RT
    return (chosen_RT.double() * counts_RT).sum(-1), (same_RT | ~counts_RT).all(-1)
