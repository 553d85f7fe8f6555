"""What a suite costs: counted from its files, more for more, and in words."""

import pytest

from compress.evaluation import cost as module
from compress.evaluation.cost import cost, matmul_rate
from compress.evaluation.prompts import load_prompts
from compress.evaluation.suite import Generation, Suite, load_suite


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "matmul_rate", lambda: 1e11)


@pytest.mark.usefixtures("steady")
def test_documents_are_counted_from_files_and_samples() -> None:
    found = cost(load_suite("embedded"), 135_000_000)
    assert (found.documents, found.tasks, found.points, found.text_tokens) == (200, 1, 3, 16 * 512)
    assert found.tokens
    assert 3_000 < found.tokens - found.text_tokens < 20_000
    found = cost(load_suite("core"), 135_000_000)
    assert (found.documents, found.tasks) == (1404, 8)
    found = cost(load_suite("core-full"), 135_000_000)
    assert (found.documents, found.tokens, found.seconds) == (None, None, None)
    assert found.text == "core-full: all documents of 8 tasks, 8,192 tokens of text, 16 prompts, 3 speed points"


@pytest.mark.usefixtures("steady")
def test_seconds_by_hand() -> None:
    suite = Suite.model_validate({"version": 1, "summary": "s", "text": {"windows": 10, "seq_len": 100}})
    found = cost(suite, 1_000_000_000)
    assert found.seconds == pytest.approx(2 * 1000 * 2e9 / 5e10 + 2 * module._START_S)
    assert found.text == "?: 1,000 tokens of text; about 2 min here for base and artifact"
    with_prompts = cost(
        suite.model_copy(update={"generation": Generation(prompts="openings", output=10)}), 1_000_000_000
    )
    longest = 1 + max(len(text) for text in load_prompts("openings").texts) // 4
    passes, reads = 16 * (longest + 10) * 2e9 / 5e10, (longest + 10) * 4e9 / 8e9
    assert with_prompts.seconds == pytest.approx(found.seconds + 2 * (passes + reads) + 2 * module._START_S)
    assert with_prompts.prompts == 16


@pytest.mark.usefixtures("steady")
def test_a_larger_model_takes_longer() -> None:
    seconds = [cost(load_suite("embedded"), params).seconds or 0 for params in (10**8, 10**9, 10**10)]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_this_machine_multiplies() -> None:
    assert 1e8 < matmul_rate() < 1e16
