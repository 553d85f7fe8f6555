"""Suites: the shipped ones and their samples; a wrong one is answered with file, line and choices."""

import json
from pathlib import Path

import pytest

from compress.errors import CompressError
from compress.evaluation.suite import TASK_METRICS, load_sample, load_suite, prompts_of, suite_names
from compress.paths import data_dir

HEAD = "version: 1\nsummary: s\n"


@pytest.mark.parametrize("name", suite_names())
def test_shipped(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert suite.accuracy
    assert suite.generation
    assert (prompts_of(suite).name, suite.generation.output) == ("openings", 48)
    assert {task.metric for task in suite.accuracy.tasks} <= set(TASK_METRICS)
    for task in suite.accuracy.tasks:
        places = [data_dir("eval") / "tasks" / task.task, data_dir("eval") / "tasks" / "local" / f"{task.task}.yaml"]
        assert any(place.exists() for place in places)


def test_embedded_rests_on_perplexity_and_core_on_accuracy() -> None:
    assert load_suite("embedded").basis == "perplexity"
    assert load_suite("core").basis == load_suite("core-full").basis == "accuracy"
    core, full = load_suite("core").accuracy, load_suite("core-full").accuracy
    assert core and full and core.tasks == full.tasks  # noqa: PT018
    assert full.sample is None


def test_the_sample_of_core_is_the_smallest_hashes() -> None:
    sample = load_sample(load_suite("core"))
    assert sample
    assert {name: len(hashes) for name, hashes in sample.documents.items()} == {
        **dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "hellaswag", "winogrande", "openbookqa"), 200),
        "lambada_openai": 200, "wikitext": 4,
    }  # fmt: skip
    for hashes in sample.documents.values():
        assert list(hashes) == sorted(set(hashes))
        assert all(len(h) == 12 and int(h, 16) >= 0 for h in hashes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accuracy: {tasks: [{task: everyday, metric: acc_nrom}]}", ["'acc_nrom'", "did you mean 'acc_norm'", ":3"]),
        ("accuracy:\n  tasks:\n    - {tsk: everyday}", ["'tsk'", "did you mean 'task'", ":5"]),
        ("accuracy: {tasks: []}", ["tasks", ":3"]),
        ("accuracy: {tasks: [{task: everyday}, {task: everyday}]}", ["'everyday' stands twice", ":3"]),
        ("accuracy: {tasks: [{task: everyday}], sample: cor}", ["'cor'", "did you mean 'core'"]),
        ("accuracy: {tasks: [{task: everyday}], sample: core}", ["no document of task 'everyday'"]),
        ("generation: {prompts: openigs}", ["unknown prompt set 'openigs'", "did you mean 'openings'"]),
        ("generation: {prompts: no/such.yaml}", ["no prompt set file 'no/such.yaml'"]),
        ("generation: {prompts: openings, outputs: 8}", ["'outputs'", "did you mean 'output'", ":3"]),
        ("generation: {prompts: openings, output: 0}", ["output", "at least 1", ":3"]),
        ("generation: {output: 8}", ["prompts", ":3"]),
        ("basis: accuracy", ["acc or acc_norm", ":3"]),
        ("basis: acuracy", ["basis", ":3"]),
    ],
)
def test_mistakes(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(HEAD + text + "\n")
    with pytest.raises(CompressError) as caught:
        load_suite(str(tmp_path / "my.yaml"))
    assert [word for word in words if word not in str(caught.value)] == []


def test_prompts_of_ones_own_lie_beside_the_suite(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(HEAD + "prompts: [{text: Once upon}, {kind: code, text: 'x ='}]\n")
    (tmp_path / "my.yaml").write_text(HEAD + "generation: {prompts: mine.yaml, output: 4}\n")
    suite = load_suite(str(tmp_path / "my.yaml"))
    assert prompts_of(suite).texts == ["Once upon", "x ="]
    assert prompts_of(suite).name == "mine"
    for wrong, words in (
        ("prompts: []", "at least 1"),
        ("prompts: [{txt: a}]", "did you mean 'text'"),
        ("x: 1", "'x'"),
    ):
        (tmp_path / "mine.yaml").write_text(HEAD + wrong + "\n")
        with pytest.raises(CompressError, match=words) as caught:
            load_suite(str(tmp_path / "my.yaml"))
        assert "mine.yaml" in str(caught.value)


def test_a_sample_of_ones_own(tmp_path: Path) -> None:
    sample = tmp_path / "mine.json"
    sample.write_text(json.dumps({"summary": "two", "tokens": 20, "documents": {"everyday": ["00", "11"]}}))
    (tmp_path / "my.yaml").write_text(HEAD + f"accuracy: {{tasks: [{{task: everyday}}], sample: {sample}}}\n")
    found = load_sample(load_suite(str(tmp_path / "my.yaml")))
    assert found
    assert found.documents == {"everyday": ("00", "11")}
    sample.write_text("{}")
    with pytest.raises(CompressError, match="not valid"):
        load_suite(str(tmp_path / "my.yaml"))
