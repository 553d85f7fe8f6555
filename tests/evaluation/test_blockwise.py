"""Scores of a model of which a block is in memory: those of the whole model, and no file stays behind."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import STRUCTURES, MakeTiny
from test_likelihood import VOCAB, loaded, questions

from compress.artifact import open_artifact
from compress.errors import CompressError
from compress.evaluation import blockwise
from compress.evaluation.blockwise import score_blockwise
from compress.evaluation.likelihood import score


@pytest.mark.parametrize("family", STRUCTURES)
def test_equals_the_whole_model(family: str, tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BATCH_TOKENS", 48)  # several batches, with padding and without
    folder, pairs, told = tiny(family, tied=family != "llama"), questions(), list[tuple[int, int]]()
    found = score_blockwise(open_artifact(folder), pairs, folder=tmp_path, progress=lambda *at: told.append(at))
    wanted = score(loaded(folder), pairs, vocab_size=VOCAB)
    assert [s.logprob for s in found] == pytest.approx([s.logprob for s in wanted], rel=1e-4)
    assert [s.greedy for s in found] == [s.greedy for s in wanted]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert not list(tmp_path.iterdir())


def test_the_order_and_the_company_do_not_matter(tiny: MakeTiny, tmp_path: Path) -> None:
    model, pairs = open_artifact(tiny("llama", tied=True)), questions()
    together = score_blockwise(model, pairs, folder=tmp_path)
    alone = [score_blockwise(model, [pair], folder=tmp_path)[0] for pair in pairs[-4:]]
    assert [s.logprob for s in together[-4:]] == pytest.approx([s.logprob for s in alone], rel=1e-5)
    backwards = score_blockwise(model, pairs[::-1], folder=tmp_path)[::-1]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in backwards], rel=1e-6)


def test_pieces_of_the_head_do_not_matter(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = open_artifact(tiny("llama", tied=True)), questions()
    whole = score_blockwise(model, pairs, folder=tmp_path)
    monkeypatch.setattr(blockwise, "LOGITS", 3 * VOCAB)
    pieces = score_blockwise(model, pairs, folder=tmp_path)
    assert [s.logprob for s in pieces] == pytest.approx([s.logprob for s in whole], rel=1e-6)
    assert [s.greedy for s in pieces] == [s.greedy for s in whole]


def test_a_disk_without_room_is_refused(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(CompressError, match="and 1,000 are free"):
        score_blockwise(open_artifact(tiny("llama", tied=True)), questions(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_scores_a_model(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model where it fits; else its blocks; another architecture in bfloat16; else nothing."""
    from compress import measure

    sizes = {4: True, 2: True}
    monkeypatch.setattr(measure, "_fits", lambda _, size=4: sizes[size])
    monkeypatch.setattr(measure, "streamed", lambda folder: folder == "known")

    def chosen(*folders: str) -> Any:
        return measure._runtime(type("Asked", (), {"folders": folders})())  # type: ignore[arg-type]

    assert chosen("known", "known") == ("hf", "float32")
    sizes[4] = False
    assert chosen("known", "known") == ("stream", "float32")
    assert chosen("known", "other") == ("hf", "bfloat16")
    sizes[2] = False
    assert chosen("known", "known") == ("stream", "float32")
    with pytest.raises(measure.Skipped):
        chosen("known", "other")
