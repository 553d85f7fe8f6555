"""The task `everyday`: well-formed items whose form (position, length) does not tell the answer."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.paths import data_dir

FOLDER = data_dir("eval") / "tasks" / "everyday"
KINDS = ("physical", "cause", "fact", "word")
Item = dict[str, Any]
ITEMS: list[Item] = [json.loads(line) for line in (FOLDER / "everyday.jsonl").read_text("utf-8").splitlines()]
CHANCE = sum(1 / len(item["choices"]) for item in ITEMS) / len(ITEMS)


def of_kind(kind: str) -> list[Item]:
    return [item for item in ITEMS if item["kind"] == kind]


def normalised(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def guessed(items: list[Item], pick: Callable[[list[int]], int], size: Callable[[str], int]) -> float:
    """Expected accuracy of always taking the choice whose size `pick` picks; ties are drawn evenly."""
    total = 0.0
    for item in items:
        sizes = [size(choice) for choice in item["choices"]]
        tied = [i for i, n in enumerate(sizes) if n == pick(sizes)]
        total += (item["label"] in tied) / len(tied)
    return total / len(items)


def test_two_hundred_items_fifty_of_each_kind() -> None:
    assert len(ITEMS) == 200
    assert Counter(item["kind"] for item in ITEMS) == dict.fromkeys(KINDS, 50)
    assert all(list(item) == ["kind", "text", "choices", "label"] for item in ITEMS)


def test_the_kinds_take_turns_so_that_the_first_documents_are_a_fair_sample() -> None:
    assert [item["kind"] for item in ITEMS] == list(KINDS) * 50


def test_choices_and_labels_are_in_range() -> None:
    for item in ITEMS:
        assert 2 <= len(item["choices"]) <= 4, item
        assert type(item["label"]) is int, item
        assert 0 <= item["label"] < len(item["choices"]), item
        assert all(1 <= len(choice.split()) <= 8 for choice in item["choices"]), item


def test_chance_is_what_the_yaml_says() -> None:
    assert f"{CHANCE:.0%}" in (FOLDER / "everyday.yaml").read_text("utf-8")


@pytest.mark.parametrize("kind", [*KINDS, "all"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_position_is_right_equally_often(kind: str, count: int) -> None:
    items = ITEMS if kind == "all" else of_kind(kind)
    right = Counter(item["label"] for item in items if len(item["choices"]) == count)
    times = [right[position] for position in range(count)]
    assert min(times) > 0
    assert max(times) - min(times) <= 1, times


def test_no_text_twice() -> None:
    twice = [text for text, n in Counter(normalised(item["text"]) for item in ITEMS).items() if n > 1]
    assert not twice


def test_no_choice_twice_in_an_item() -> None:
    for item in ITEMS:
        assert len({normalised(choice) for choice in item["choices"]}) == len(item["choices"]), item


def test_plain_ascii_without_stray_spaces() -> None:
    for item in ITEMS:
        for text in (item["text"], *item["choices"]):
            assert text.isascii(), text
            assert text.isprintable(), text
            assert text == " ".join(text.split()), text


def test_each_choice_ends_the_sentence_that_the_text_begins() -> None:
    for item in ITEMS:
        assert item["text"][0].isupper(), item
        assert item["text"][-1].isalpha(), item
        assert all(re.fullmatch(r"[A-Za-z][A-Za-z' -]*\.", choice) for choice in item["choices"]), item


def test_an_article_before_the_choices_fits_them_all() -> None:
    for item in ITEMS:
        article = item["text"].split()[-1]
        if article in ("a", "an"):
            assert {choice[0] in "aeiou" for choice in item["choices"]} == {article == "an"}, item


def test_choices_are_of_similar_length() -> None:
    for item in ITEMS:
        lengths = [len(choice) for choice in item["choices"]]
        assert max(lengths) - min(lengths) <= 6, item


@pytest.mark.parametrize("size", [len, lambda choice: len(choice.split())], ids=["characters", "words"])
@pytest.mark.parametrize("pick", [max, min], ids=["longest", "shortest"])
def test_length_does_not_tell_the_answer(pick: Callable[[Sequence[int]], int], size: Callable[[str], int]) -> None:
    assert guessed(ITEMS, pick, size) == pytest.approx(CHANCE, abs=0.05)
    for kind in KINDS:
        assert guessed(of_kind(kind), pick, size) == pytest.approx(CHANCE, abs=0.12), kind


@pytest.mark.parametrize("pick", [max, min], ids=["longest", "shortest"])
def test_the_right_answer_seldom_stands_alone_in_length(pick: Callable[[Sequence[int]], int]) -> None:
    alone = 0
    for item in ITEMS:
        lengths = [len(choice) for choice in item["choices"]]
        alone += lengths.count(pick(lengths)) == 1 and lengths[item["label"]] == pick(lengths)
    assert alone / len(ITEMS) <= CHANCE + 0.05


def test_the_yaml_is_a_task_that_lm_eval_loads(tmp_path: Path) -> None:
    config = yaml.safe_load((FOLDER / "everyday.yaml").read_text("utf-8"))
    files = config["dataset_kwargs"]["data_files"]
    assert files == {"test": "everyday.jsonl"}
    assert config["task"] == FOLDER.name

    from lm_eval.api.task import ConfigurableTask

    absolute = {split: str(FOLDER / name) for split, name in files.items()}
    config["dataset_kwargs"] = {"data_files": absolute, "cache_dir": str(tmp_path)}
    task = ConfigurableTask(config=config)
    assert task.OUTPUT_TYPE == "multiple_choice"
    assert task.VERSION == 1.0
    assert set(task.aggregation()) == {"acc", "acc_norm"}
    documents = list(task.test_docs())
    assert [task.doc_to_text(document) for document in documents] == [item["text"] for item in ITEMS]
    assert [task.doc_to_choice(document) for document in documents] == [item["choices"] for item in ITEMS]
    assert [task.doc_to_target(document) for document in documents] == [item["label"] for item in ITEMS]
    requests = task.construct_requests(documents[0], task.doc_to_text(documents[0]), doc_id=0, metadata=("", 0, 1))
    assert [request.args for request in requests] == [(ITEMS[0]["text"], f" {c}") for c in ITEMS[0]["choices"]]
