"""Agreement, repetition and endings of outputs short enough to count by hand."""

import pytest

from compress.evaluation.generation import METRICS, agreement, alike, generation_rows, repeated

WHERE = {"output": 8}


def output(tokens: list[int], end: int = 9) -> dict:
    return {"tokens": tokens, "text": "", "ended": tokens[-1] == end}


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [3, 2], 0),
        ([1, 9], [1, 2, 3], 1),  # one ends where the other goes on
        ([1, 2, 3], [1, 2, 3], 8),  # they never part: all that was asked for
        ([9], [9], 8),
    ],
)
def test_tokens_before_the_first_that_differs(one: list[int], other: list[int], length: int) -> None:
    assert agreement(one, other, 8) == agreement(other, one, 8) == length


def test_of_texts_too() -> None:
    assert alike("one, two", "one, three") == len("one, t")
    assert alike("", "a") == 0


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([], 0),
        ([1, 2, 3], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1),  # 1 2 3 4 again: its last token
        ([1, 2, 3, 4, 1, 2, 3, 4, 1], 2),  # and 2 3 4 1
        ([7] * 4, 0),
        ([7] * 6, 2),  # 7 7 7 7 overlaps itself
        ([1, 2, 3, 4, 5, 1, 2, 3, 5], 0),
    ],
)
def test_tokens_that_end_a_4_gram_seen_before(tokens: list[int], count: int) -> None:
    assert repeated(tokens) == count


def test_rows_by_hand() -> None:
    base = [output([1, 2, 3, 9]), output([7] * 8), output([1, 2, 3, 4, 5, 6, 7, 8]), output([4, 9])]
    artifact = [output([1, 2, 4, 4, 5, 6, 7, 9]), output([7] * 8), output([2] * 6 + [3, 4]), output([4, 9])]
    rows = {(r["metric"], r["subject"]): r for r in generation_rows(base, artifact, "few", WHERE)}
    assert {metric for metric, _ in rows} == set(METRICS)
    agree = rows["greedy_agreement", "pair"]
    assert (agree["value"], agree["unit"], agree["n"]) == ((2 + 8 + 0 + 8) / 4, "tokens", 4)
    assert agree["context"]["identical"] == 2
    assert 0 <= agree["low"] < agree["value"] < agree["high"] <= 8
    assert rows["greedy_agreement_median", "pair"]["value"] == 5  # of 0, 2, 8 and 8
    repetition = rows["repetition", "base"]
    assert (repetition["value"], repetition["n"]) == (4 / 22, 22)  # of 4, 8, 8 and 2 tokens, those of 7 7 7 7 7 7 7 7
    assert repetition["conditions"] == {"output": 8, "ngram": 4}
    assert rows["repetition", "artifact"]["value"] == (4 + 2) / 26
    assert [rows["endings", subject]["value"] for subject in ("base", "artifact")] == [0.5, 0.5]
    assert rows["endings", "base"]["low"] < 0.5 < rows["endings", "base"]["high"]


def test_a_model_agrees_with_itself_to_the_end() -> None:
    same = [output([1, 2, 3, 9]), output([7] * 8)]
    rows = {(r["metric"], r["subject"]): r["value"] for r in generation_rows(same, same, "few", WHERE)}
    assert rows["greedy_agreement", "pair"] == rows["greedy_agreement_median", "pair"] == 8


def test_alone_there_is_nothing_to_agree_with() -> None:
    rows = generation_rows(None, [output([1, 9])], "few", WHERE)
    assert {(r["metric"], r["subject"]) for r in rows} == {("repetition", "artifact"), ("endings", "artifact")}
