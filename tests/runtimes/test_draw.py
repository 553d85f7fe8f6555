"""Text drawn from a model: seeded, begun as the tokenizer begins, from the model's own distribution."""

import torch

from compress.runtimes.draw import draw, sample
from compress.runtimes.hf import HfRuntime
from tests.conftest import MakeTiny


def test_sampling_is_seeded_and_private(tiny: MakeTiny) -> None:
    runtime = HfRuntime()
    runtime.load(tiny("llama", tied=True), threads=1)
    before = torch.get_rng_state()
    first, again, other = (sample(runtime, 0, 18, 12, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (18, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first[:, 0].tolist() == [0] * 18


def test_tokens_follow_the_models_distribution(tiny: MakeTiny) -> None:
    runtime = HfRuntime()
    runtime.load(tiny("llama", tied=True), threads=1, dtype="float32")
    drawn = sample(runtime, 0, 4000, 2, seed=0)[:, 1]
    expected_V = runtime.prefill(torch.tensor([[0]]))[0].float().softmax(-1)
    seen_V = torch.bincount(drawn, minlength=len(expected_V)) / len(drawn)
    assert float((seen_V - expected_V).abs().sum()) < 0.35  # total variation of 4000 draws over 320 tokens


def test_drawing_in_a_process_of_its_own(tiny: MakeTiny) -> None:
    folder = tiny("llama", tied=True)
    runtime = HfRuntime()
    runtime.load(folder, threads=1)
    assert torch.equal(draw(folder, 0, 3, 9, 5, threads=1), sample(runtime, 0, 3, 9, 5))
