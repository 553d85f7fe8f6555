"""lm-eval's tasks and our scoring: the same prompts from local files, and the same answers as lm-eval's own model."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTiny

from compress.errors import CompressError
from compress.evaluation import accuracy, questions
from compress.evaluation.suite import Suite, load_suite
from compress.paths import data_dir

# A record as the hub has it, and as the local file has it; words of ours.
RECORDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "arc_easy": (
        "arc",
        {"question": "Which of these is cold?", "choices": {"text": ["ice", "fire", "sand"], "label": ["A", "B", "C"]},
         "answerKey": "A"},
        {"question": "Which of these is cold?", "choices": ["ice", "fire", "sand"], "label": 0},
    ),
    "arc_challenge": (
        "arc",
        {"question": "Why does it rain?", "choices": {"text": ["by habit", "clouds cool"], "label": ["1", "2"]},
         "answerKey": "2"},
        {"question": "Why does it rain?", "choices": ["by habit", "clouds cool"], "label": 1},
    ),
    "piqa": (
        "piqa",
        {"goal": "Open a tin", "sol1": "Turn the opener.", "sol2": "Ask it kindly.", "label": 0},
        {"goal": "Open a tin", "sol1": "Turn the opener.", "sol2": "Ask it kindly.", "label": 0},
    ),
    "hellaswag": (
        "hellaswag",
        {"activity_label": "Baking bread", "ctx_a": "A man kneads dough.", "ctx_b": "he", "label": "1",
         "endings": ["flies  away.", "waits [step] an hour.", "eats the oven.", "sings."]},
        {"query": "Baking bread: A man kneads dough. He",
         "choices": ["flies away.", "waits  an hour.".replace("  ", " "), "eats the oven.", "sings."], "label": 1},
    ),
    "winogrande": (
        "winogrande",
        {"sentence": "The cup fell off the shelf because the _ was wet.", "option1": "cup", "option2": "shelf",
         "answer": "2"},
        {"question": "The cup fell off the shelf because the _ was wet.", "choices": ["cup", "shelf"], "label": 1},
    ),
    "openbookqa": (
        "openbookqa",
        {"question_stem": "A plant needs", "choices": {"text": ["light", "shoes"], "label": ["A", "B"]},
         "answerKey": "A"},
        {"question": "A plant needs", "choices": ["light", "shoes"], "label": 0},
    ),
    "lambada_openai": (
        "lambada", {"text": "He put the kettle on and made tea"}, {"text": "He put the kettle on and made tea"}
    ),
    "wikitext": (
        "wikitext", {"page": " \n = Tea = \n \n Tea , a drink , is 5 @,@ 000 years old . \n"},
        {"page": " \n = Tea = \n \n Tea , a drink , is 5 @,@ 000 years old . \n"},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))


@contextlib.contextmanager
def lm_evals_own(name: str, folder: str, record: dict[str, Any], place: Path) -> Iterator[Any]:
    """lm-eval's own task, its documents from a file of records as the hub has them."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    files = list((accuracy._LM_EVAL_TASKS / folder).glob("*.yaml"))
    file = next(f for f in files if f"\ntask: {name}\n" in "\n" + f.read_text())
    config = load_yaml(file)
    split = "validation" if config.get("test_split") is None else "test"
    (place / "hub.jsonl").write_text(json.dumps(record) + "\n")
    config |= {
        "dataset_path": "json", "dataset_name": None, "training_split": None, "validation_split": None,
        "test_split": None, f"{split}_split": split,
        "dataset_kwargs": {"data_files": {split: str(place / "hub.jsonl")}},
    }  # fmt: skip
    config.pop("tag", None)
    yield ConfigurableTask(config=config)


@pytest.mark.parametrize("name", RECORDS)
def test_local_prompts_are_lm_evals(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same requests, same answers, same metrics, and so the same hash: hub and folder give the same documents."""
    folder, hub, local = RECORDS[name]
    yaml = (data_dir("eval") / "tasks" / "local" / f"{name}.yaml").read_text()
    file = next(word for word in yaml.replace("}", " ").split() if word.endswith(".jsonl"))
    (tmp_path / file).write_text(json.dumps(local) + "\n")
    monkeypatch.setenv("COMPRESS_DATA_DIR", str(tmp_path))
    ours = accuracy.load_tasks([name])[name]
    with lm_evals_own(name, folder, hub, tmp_path) as theirs:
        for task in (ours, theirs):
            task.build_all_requests()
        shown = [[request.args for request in task.instances] for task in (ours, theirs)]
        assert shown[0] == shown[1]
        assert len(shown[0]) >= 1
        names = [accuracy.document_hash(task, task.eval_docs[0]) for task in (ours, theirs)]
        assert names[0] == names[1]
        results = [(-2.0, True), (-1.0, False), (-3.0, False), (-4.0, False)][: len(shown[0])]
        given = [r[0] for r in results] if name == "wikitext" else results
        scored = [task.process_results(task.eval_docs[0], given) for task in (ours, theirs)]
        assert scored[0] == scored[1]
        listed = [{(m["metric"], m.get("aggregation")) for m in task.config.metric_list} for task in (ours, theirs)]
        assert listed[0] == listed[1]
        assert ours.VERSION == theirs.VERSION


DATA = Path(__file__).parents[3] / "shared" / "data" / "lm_eval"


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the files of the field's tasks")
def test_the_sample_of_core_is_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_DATA_DIR", str(DATA))
    suite = load_suite("core")
    assert suite.accuracy
    tasks = tuple(task for task in suite.accuracy.tasks if task.task != "lambada_openai")  # it takes long
    small = suite.accuracy.model_copy(update={"tasks": tasks})
    found = questions.documents(suite.model_copy(update={"accuracy": small}))
    assert {name: len(pairs) for name, pairs in found.items()} == {
        **dict.fromkeys(("arc_easy", "arc_challenge", "piqa", "hellaswag", "winogrande", "openbookqa"), 200),
        "wikitext": 4,
    }  # fmt: skip


# ---- answers


ASKED = list(range(3, 93, 3))


def everyday(model: Path, runtime: str = "hf") -> dict[str, Any]:
    tasks = {"everyday": [(i, f"{i:012x}") for i in ASKED]}
    request = {"tasks": tasks, "model": str(model), "runtime": runtime, "dtype": "float32", "threads": 1}
    found: dict[str, Any] = accuracy.answer(request)["everyday"]
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_same_answers_as_lm_evals_own_model(family: str, tiny: MakeTiny) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny(family, tied=True)
    ours = everyday(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=4),
        tasks=list(accuracy.load_tasks(["everyday"]).values()), samples={"everyday": ASKED},
        bootstrap_iters=0,
    )  # fmt: skip
    assert theirs
    samples = {s["doc_id"]: s for s in theirs["samples"]["everyday"]}
    assert len(ours["documents"]) == 30
    for index, document in zip(ASKED, ours["documents"], strict=True):
        assert document["document"] == f"{index:012x}"
        wanted = [response[0] for response in samples[index]["filtered_resps"]]
        assert document["logprobs"] == pytest.approx(wanted, rel=1e-4)
        assert (document["acc"], document["acc_norm"]) == (samples[index]["acc"], samples[index]["acc_norm"])
        assert document["choices"] == len(wanted)
    assert ours["metrics"]["acc"] == theirs["results"]["everyday"]["acc,none"]


def test_block_by_block_gives_the_same_answers(tiny: MakeTiny) -> None:
    folder = tiny("gemma3_text", tied=True)
    ours, theirs = everyday(folder, "stream"), everyday(folder)
    for a, b in zip(ours.pop("documents"), theirs.pop("documents"), strict=True):
        assert a.pop("logprobs") == pytest.approx(b.pop("logprobs"), rel=1e-4)
        assert a == b
    assert ours == theirs
    assert ours["bos"] is True
    assert not list(Path(os.environ["COMPRESS_CACHE"]).glob("hidden-*"))


def test_whole_pages_as_lm_evals_own_model(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of the model's length, each token once."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny("llama", tied=True, max_position_embeddings=48)
    page = {"page": " \n = Tea = \n \n Tea , a drink of leaves , is 5 @,@ 000 years old . " * 4}
    (tmp_path / "wikitext2_test_pages.jsonl").write_text(json.dumps(page) + "\n")
    monkeypatch.setenv("COMPRESS_DATA_DIR", str(tmp_path))
    request = {
        "tasks": {"wikitext": [(0, "0")]},
        "model": str(folder),
        "runtime": "hf",
        "dtype": "float32",
        "threads": 1,
    }
    ours = accuracy.answer(request)["wikitext"]["metrics"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1),
        tasks=list(accuracy.load_tasks(["wikitext"]).values()), bootstrap_iters=0,
    )  # fmt: skip
    assert theirs
    for metric, value in ours.items():
        assert value == pytest.approx(theirs["results"]["wikitext"][f"{metric},none"], rel=1e-4)


def test_a_context_that_is_too_long_is_cut_on_the_left(tiny: MakeTiny) -> None:
    model = accuracy.Scored(lambda pairs: [], None, positions=10)
    context, continuation = tuple(range(20)), (90, 91, 92)
    kept, scored = model._fitted(context, continuation)
    assert (kept, scored) == (context[-8:], continuation)  # the last scored token is not fed
    kept, scored = model._fitted((1,), tuple(range(30)))
    assert (kept, scored) == ((19,), tuple(range(20, 30)))


# ---- tasks and documents


def test_what_stands_twice_is_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"text": text} for text in ("a b", "c d", "a b")]
    (tmp_path / "lambada_test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("COMPRESS_DATA_DIR", str(tmp_path))
    task = accuracy.load_tasks(["lambada_openai"])["lambada_openai"]
    pairs = accuracy.choose(task, "lambada_openai", None)
    assert [index for index, _ in pairs] == [0, 1]
    assert accuracy.choose(task, "lambada_openai", [pairs[1][1]]) == [pairs[1]]
    with pytest.raises(CompressError, match="1 of the sample's documents of task 'lambada_openai' are not in the data"):
        accuracy.choose(task, "lambada_openai", [pairs[0][1], "000000000000"])


def test_no_hub_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.delenv("COMPRESS_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CompressError, match="documents of task 'piqa' cannot be had") as caught:
        accuracy.load_tasks(["piqa"])
    assert "COMPRESS_DATA_DIR" in str(caught.value.hint)


def test_a_data_folder_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_DATA_DIR", str(tmp_path))
    with pytest.raises(CompressError, match=r"documents of task 'piqa' cannot be had.*piqa_valid\.jsonl"):
        accuracy.load_tasks(["piqa"])


@pytest.mark.slow
def test_an_unknown_task() -> None:
    with pytest.raises(CompressError, match="unknown task 'everydy'; did you mean 'everyday'"):
        accuracy.load_tasks(["everydy"])


def test_answers_are_remembered(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def call(module: str, request: dict[str, Any], **_: Any) -> Any:
        asked.append(request)
        document = {"document": "d", "choices": 2, "acc": 1.0, "logprobs": [-1.0]}
        return {"t": {"documents": [document], "metrics": {"acc": 1.0}, "version": "1"}}

    monkeypatch.setattr(questions, "call", call)
    settings: dict[str, Any] = {"runtime": "hf", "threads": 1, "progress": lambda *_: None}
    first, second = tiny("llama", tied=True), tiny("llama", tied=False)
    once = questions.answers(first, {"t": [(0, "d")]}, dtype="float32", **settings)
    assert questions.answers(first, {"t": [(0, "d")]}, dtype="float32", **settings) == once
    assert len(asked) == 1
    questions.answers(first, {"t": [(0, "d")]}, dtype="bfloat16", **settings)
    questions.answers(first, {"t": [(0, "d"), (1, "e")]}, dtype="float32", **settings)
    questions.answers(second, {"t": [(0, "d")]}, dtype="float32", **settings)
    questions.answers(second, {"t": [(0, "d")]}, dtype="float32", **settings | {"runtime": "stream"})
    assert len(asked) == 5
    for kept in (Path(os.environ["COMPRESS_CACHE"]) / "answers").iterdir():
        kept.write_text(kept.read_text().replace("1.0", "2.0"))  # damaged
    assert questions.answers(first, {"t": [(0, "d")]}, dtype="float32", **settings) == once
    assert len(asked) == 6

    questions.keep(tmp_path, once, once)
    line = json.loads((tmp_path / "documents" / "t.jsonl").read_text())
    assert line["base"] == line["artifact"] == {"acc": 1.0, "logprobs": [-1.0]}
    assert (line["document"], line["choices"]) == ("d", 2)


def test_documents_are_asked_in_a_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite.model_validate({"version": 1, "summary": "s", "accuracy": {"tasks": [{"task": "everyday"}]}})
    found = questions.documents(suite)
    assert len(found["everyday"]) == 200
    monkeypatch.setattr(questions, "call", None)
    assert questions.documents(suite) is found
