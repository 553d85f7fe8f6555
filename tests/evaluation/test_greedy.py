"""Prompts of several lengths together give what each gives alone; end tokens end."""

import pytest
import torch
from conftest import MakeTiny

from compress.evaluation import greedy
from compress.evaluation.greedy import continuations
from compress.runtimes.hf import HfRuntime

PROMPTS = [[0, 50, 60, 70], [0, 51], [0, 80, 90, 100, 110, 120, 130], [0, 51, 99]]


def nothing(*_: int) -> None:
    """No progress."""


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_together_as_alone(tiny: MakeTiny, family: str) -> None:
    """`generate` gives the same for each prompt by itself; windows of 8 tokens slide past."""
    runtime = HfRuntime()
    runtime.load(tiny(family, tied=True), threads=1, dtype="float32")
    found = continuations(runtime, PROMPTS, output=12, ends=(), progress=nothing)
    assert found == [runtime.generate(torch.tensor([prompt]), 12)[0].tolist() for prompt in PROMPTS]
    assert continuations(runtime, PROMPTS, output=12, ends=(), progress=nothing) == found
    ends = {found[0][4], found[2][0]}
    cut = continuations(runtime, PROMPTS, output=12, ends=ends, progress=nothing)
    for whole, part in zip(found, cut, strict=True):
        places = [i for i, token in enumerate(whole) if token in ends]
        assert part == (whole[: places[0] + 1] if places else whole)
    assert len(cut[2]) == 1
    assert continuations(runtime, PROMPTS, output=1, ends=(), progress=nothing) == [said[:1] for said in found]


def test_the_worker(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(greedy, "tell", lambda *at: told.append(at))
    request = {
        "model": str(tiny("llama", tied=True)), "runtime": "hf", "dtype": "float32", "threads": 1,
        "prompts": PROMPTS, "output": 6, "ends": [],
    }  # fmt: skip
    found = greedy.answer(request)
    assert [len(said["tokens"]) for said in found] == [6] * 4
    assert all(isinstance(said["text"], str) and not said["ended"] for said in found)
    assert told[0] == (0, 11)
    assert len(told) == 11
    stopped = greedy.answer({**request, "ends": [found[1]["tokens"][2]]})
    assert stopped[1]["ended"]
    assert stopped[1]["tokens"][-1] == found[1]["tokens"][2]
