"""Likelihoods of continuations: the plain way in float64, whatever is shared, batched or cut into pieces."""

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from conftest import STRUCTURES, MakeTiny

from compress.evaluation import likelihood
from compress.evaluation.likelihood import Score, Tokens, score
from compress.runtimes.hf import HfRuntime

VOCAB = 320


def plainly(folder: Path, context: Tokens, continuation: Tokens) -> Score:
    """One sequence at a time, without a cache, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits_TV = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    target_T = torch.tensor(continuation)
    logprob = logits_TV.log_softmax(-1).gather(-1, target_T.unsqueeze(-1)).sum()
    return Score(float(logprob), bool((logits_TV.argmax(-1) == target_T).all()))


def loaded(folder: Path) -> HfRuntime:
    runtime = HfRuntime()
    runtime.load(folder, threads=1, dtype="float32")
    return runtime


def drawn(seed: int, *lengths: int) -> list[Tokens]:
    source = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=source).tolist()) for n in lengths]


def questions() -> list[tuple[Tokens, Tokens]]:
    """Shared contexts, contexts of one length and of others, single tokens, one pair twice, more than the window."""
    contexts = drawn(0, 5, 5, 9, 1, 21)
    endings = drawn(1, 1, 3, 7, 1, 12)
    pairs = [(c, e) for c in contexts for e in endings[:4]]
    return [*pairs, (contexts[4], endings[4]), pairs[0], (contexts[3], drawn(2, 30)[0])]


@pytest.mark.parametrize("family", STRUCTURES)
def test_equals_the_plain_way(family: str, tiny: MakeTiny) -> None:
    folder = tiny(family, tied=family != "llama")
    pairs = questions()
    found = score(loaded(folder), pairs, vocab_size=VOCAB)
    wanted = [plainly(folder, *pair) for pair in pairs]
    assert [s.logprob for s in found] == pytest.approx([s.logprob for s in wanted], rel=1e-4)
    assert [s.greedy for s in found] == [s.greedy for s in wanted]


def test_the_order_and_the_company_do_not_matter(tiny: MakeTiny) -> None:
    runtime, pairs = loaded(tiny("llama", tied=True)), questions()
    together = score(runtime, pairs, vocab_size=VOCAB)
    backwards = score(runtime, pairs[::-1], vocab_size=VOCAB)[::-1]
    alone = [score(runtime, [pair], vocab_size=VOCAB)[0] for pair in pairs]
    for other in (backwards, alone):
        assert [s.logprob for s in other] == pytest.approx([s.logprob for s in together], rel=1e-4)


def test_pieces_do_not_matter(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, pairs = loaded(tiny("gemma3_text", tied=True)), questions()
    whole = score(runtime, pairs, vocab_size=VOCAB)
    monkeypatch.setattr(likelihood, "LOGITS", 2 * VOCAB)
    monkeypatch.setattr(likelihood, "_PREFILL_TOKENS", 8)
    pieces = score(runtime, pairs, vocab_size=VOCAB)
    assert [s.logprob for s in pieces] == pytest.approx([s.logprob for s in whole], rel=1e-4)
    assert [s.greedy for s in pieces] == [s.greedy for s in whole]


def test_what_the_model_says_itself_is_greedy(tiny: MakeTiny) -> None:
    runtime = loaded(tiny("qwen3", tied=False))
    context = drawn(3, 6)[0]
    said = tuple(runtime.generate(torch.tensor([context]), 5)[0].tolist())
    other = (*said[:4], (said[4] + 1) % VOCAB)
    assert [s.greedy for s in score(runtime, [(context, said), (context, other)], vocab_size=VOCAB)] == [True, False]


def test_progress_ends_at_the_number_of_different_pairs(tiny: MakeTiny) -> None:
    told: list[tuple[int, int]] = []
    pairs = questions()
    score(loaded(tiny("llama", tied=True)), pairs, vocab_size=VOCAB, progress=lambda *done: told.append(done))
    assert told[-1] == (len(set(pairs)), len(set(pairs)))
    assert told == sorted(told)


def test_stretches_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every way of cutting at lengths: a pass each, and a token of every row that goes on."""
    monkeypatch.setattr(likelihood, "_PASS", 3)
    source = torch.Generator().manual_seed(0)
    for _ in range(20):
        follows = torch.randint(0, 9, (6,), generator=source).tolist()
        found = likelihood._spans(follows, 1000)
        ends = sorted(set(follows) - {0})
        ways = [[0, *some, ends[-1]] for n in range(len(ends)) for some in combinations(ends[:-1], n)] if ends else [[]]
        costs = [sum(3 + (b - a) * sum(f > a for f in follows) for a, b in pairwise(way)) for way in ways]
        assert sum(3 + (b - a) * sum(f > a for f in follows) for a, b in found) == min(costs)
        assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
    assert likelihood._spans([0, 0], 1000) == []
    assert likelihood._spans([5, 5], 4) == [(0, 2), (2, 4), (4, 5)]
