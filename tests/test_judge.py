"""`compress eval`: an artifact against its own base, in place; anything else into a folder of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTiny, byte_tokenizer

from compress import cli, pipeline, verify
from compress.artifact import read_lock
from compress.errors import CompressError
from compress.evaluation import continuations, draw, memory, questions, speed, worker
from compress.judge import judge

WORDS = " ".join(f"word {i} of many" for i in range(200))
RECIPE = """version: 1
summary: eight bits
steps: [{method: rtn, scheme: W4A16, group_size: 32}]
calibration: {samples: 4, seq_len: 32}
evaluate: {suite: suite.yaml, delta: 0.2}
"""
SUITE = """version: 1
summary: small
text: {dataset: "file:words.txt", windows: 4, seq_len: 32}
accuracy: {tasks: [{task: everyday}], sample: few.json}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a suite of ten questions; each test has a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("words.txt").write_text(WORDS)
    Path("recipe.yaml").write_text(RECIPE)
    Path("suite.yaml").write_text(SUITE)
    Path("few.json").write_text(
        json.dumps(
            {
                "summary": "ten",
                "tokens": 300,
                "documents": {"everyday": names([3, 7, 20, 41, 60, 77, 99, 120, 161, 199])},
            }
        )
    )
    return tmp_path


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers answer in this process: their libraries are imported once."""
    import importlib

    def call(module: str, request: dict[str, Any], **_: Any) -> Any:
        return importlib.import_module(module).answer(json.loads(json.dumps(request)))

    for module in (questions, continuations, worker, draw, verify, speed):
        monkeypatch.setattr(module, "call", call)


def names(places: list[int]) -> list[str]:
    """Hashes of some documents of `everyday`, computed as their definition says."""
    import hashlib

    from compress.paths import data_dir

    lines = (data_dir("eval") / "tasks" / "everyday" / "everyday.jsonl").read_text().splitlines()
    shown = [[d["text"], d["label"], d["choices"]] for d in (json.loads(lines[i]) for i in places)]
    return [hashlib.sha256(json.dumps(s, ensure_ascii=False).encode()).hexdigest()[:12] for s in shown]


def nothing(*_: Any) -> None:
    """No progress."""


def make(model: Path, *, evaluate: bool = False) -> Path:
    return pipeline.run("recipe.yaml", str(model), Path("made"), evaluate=evaluate, progress=nothing).folder


def subjects(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["metric"], row["subject"]) for row in report["measurements"]}


def test_an_artifact_in_place(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", tied=True)
    folder = make(model)
    before = json.loads((folder / "report.json").read_text())
    assert before["verdict"] is None
    with pytest.raises(CompressError, match="was made from a folder") as caught:
        judge(str(folder), progress=nothing)
    assert "--against" in str(caught.value.hint)

    outcome = judge(str(folder), against=str(model), progress=nothing)
    report = outcome.report
    assert outcome.folder == folder
    assert report == json.loads((folder / "report.json").read_text())
    assert subjects(before) < subjects(report)
    assert subjects(report) >= {
        ("acc", "base"), ("acc", "artifact"), ("acc_delta", "pair"), ("flips", "pair"), ("recovery", "pair"),
        ("kld_mean", "pair"), ("nll_delta", "pair"), ("compress_cpu_s", "artifact"),
    }  # fmt: skip
    assert report["verified"]["logit_error"] < 1e-2
    verdict = report["verdict"]
    assert verdict["basis"] == "perplexity"
    assert verdict["overall"] in ("non_inferior", "worse", "undecided")
    assert verdict["low"] < verdict["value"] < verdict["high"]
    lock = read_lock(folder)
    assert set(lock["stages"]) == {"compress", "whole", "fidelity", "accuracy", "generation", "speed"}
    assert lock["suite"]["name"] == "suite"
    lines = [json.loads(line) for line in (folder / "documents" / "everyday.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    right = sum(line["artifact"]["acc"] for line in lines) / 10
    assert right == next(
        r["value"] for r in report["measurements"] if (r["metric"], r["subject"]) == ("acc", "artifact")
    )
    assert (folder / "charts" / "accuracy.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(questions, "call", None)  # nothing is measured twice
    assert judge(str(folder), against=str(model), progress=nothing).report == report


@pytest.mark.usefixtures("inline")
def test_another_suite_takes_the_place_of_the_first(tiny: MakeTiny) -> None:
    model = tiny("llama", tied=True)
    folder = make(model, evaluate=True)
    Path("plain.yaml").write_text(SUITE.split("accuracy", maxsplit=1)[0])
    report = judge(str(folder), suite="plain.yaml", against=str(model), progress=nothing).report
    assert ("acc", "base") not in subjects(report)
    assert ("kld_mean", "pair") in subjects(report)


@pytest.mark.usefixtures("inline")
def test_what_both_write(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, kept and shown; asked once; gone with a suite that does not ask for it."""
    monkeypatch.setattr(draw, "draw", lambda *_: None)  # charts take seconds
    prompts = "[{text: One day <b>}, {kind: list, text: 'Red,'}]"
    Path("few.yaml").write_text(f"version: 1\nsummary: two\nprompts: {prompts}\n")
    Path("plain.yaml").write_text(SUITE.split("accuracy", maxsplit=1)[0])
    Path("write.yaml").write_text(Path("plain.yaml").read_text() + "generation: {prompts: few.yaml, output: 5}\n")
    model = tiny("llama", tied=True)
    folder = make(model)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_memory_bytes", lambda: 1000)
        report = judge(str(folder), suite="write.yaml", against=str(model), progress=nothing).report
        assert any(note.startswith("generation not measured") for note in report["artifact"]["notes"])
    report = judge(str(folder), suite="write.yaml", against=str(model), progress=nothing).report
    rows = {(r["metric"], r["subject"]): r for r in report["measurements"] if r["task"] == "few"}
    assert set(rows) == {
        ("greedy_agreement", "pair"), ("greedy_agreement_median", "pair"), ("repetition", "base"),
        ("repetition", "artifact"), ("endings", "base"), ("endings", "artifact"),
    }  # fmt: skip
    where = rows["greedy_agreement", "pair"]["conditions"]
    assert (where["batch"], where["output"], where["dtype"], where["runtime"]) == (2, 5, "float32", "hf")
    lines = [json.loads(line) for line in (folder / "generation.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["prompt"]) for line in lines] == [("text", "One day <b>"), ("list", "Red,")]
    lengths = [5 if line["base"] == line["artifact"] else line["alike"] for line in lines]
    assert rows["greedy_agreement", "pair"]["value"] == sum(lengths) / 2
    assert "One day &lt;b&gt;" in (folder / "report.html").read_text()
    assert "generation.jsonl" in read_lock(folder)["files"]
    assert "generation not measured" not in str(report["artifact"]["notes"])

    monkeypatch.setattr(continuations, "call", None)
    assert judge(str(folder), suite="write.yaml", against=str(model), progress=nothing).report == report
    plain = judge(str(folder), suite="plain.yaml", against=str(model), progress=nothing).report
    assert "few" not in {r["task"] for r in plain["measurements"]}
    assert not (folder / "generation.jsonl").exists()
    again = judge(str(folder), suite="write.yaml", against=str(model), progress=nothing).report  # from the cache
    assert [r for r in again["measurements"] if r["task"] == "few"] == list(rows.values())
    make(tiny("llama", tied=True, seed=5))
    assert not (folder / "generation.jsonl").exists()  # never beside other weights


@pytest.mark.usefixtures("inline")
def test_not_the_base_that_it_was_made_from(tiny: MakeTiny) -> None:
    """Compared all the same, but not in the artifact's own report."""
    folder = make(tiny("llama", tied=True))
    kept = (folder / "report.json").read_bytes()
    other = tiny("llama", tied=True, seed=7)
    outcome = judge(str(folder), against=str(other), progress=nothing)
    assert outcome.folder == Path("evaluations") / f"made--vs--{other.name}"
    assert outcome.report["base"]["name"] == other.name
    assert (folder / "report.json").read_bytes() == kept


@pytest.mark.usefixtures("inline")
def test_what_changes_no_weight_changes_the_verdict(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another delta or basis: nothing is measured again, and everything says the new one."""
    Path("suite.yaml").write_text(SUITE + "basis: accuracy\n")
    model = tiny("llama", tied=True)
    folder = make(model, evaluate=True)
    first = json.loads((folder / "report.json").read_text())["verdict"]
    assert (first["basis"], first["delta"]) == ("accuracy", 0.2)
    for module in (questions, worker, verify, speed):
        monkeypatch.setattr(module, "call", None)
    Path("recipe.yaml").write_text(RECIPE.replace("0.2", "0.9"))
    make(model, evaluate=True)
    second = json.loads((folder / "report.json").read_text())["verdict"]
    assert (second["delta"], second["overall"]) == (0.9, "non_inferior")
    assert "0.9" in (folder / "recipe.yaml").read_text()
    assert read_lock(folder)["recipe"]["evaluate"]["delta"] == 0.9
    Path("suite.yaml").write_text(SUITE)
    make(model, evaluate=True)
    assert json.loads((folder / "report.json").read_text())["verdict"]["basis"] == "perplexity"
    assert read_lock(folder)["suite"]["basis"] == "perplexity"


@pytest.mark.usefixtures("inline")
def test_other_questions_are_asked_anew(tiny: MakeTiny) -> None:
    model = tiny("llama", tied=True)
    once = judge(str(model), suite="suite.yaml", progress=nothing)
    Path("few.json").write_text(json.dumps({"summary": "two", "tokens": 9, "documents": {"everyday": names([1, 2])}}))
    questions.documents.cache_clear()
    again = judge(str(model), suite="suite.yaml", progress=nothing)
    counts = [{r["n"] for r in o.report["measurements"] if r["metric"] == "acc"} for o in (once, again)]
    assert counts == [{10}, {2}]


@pytest.mark.usefixtures("inline")
def test_no_room_now_is_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mixtral(Path("model"), 1)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_memory_bytes", lambda: 1000)
        report = judge(str(model), suite="suite.yaml", progress=nothing).report
        assert {r["metric"] for r in report["measurements"]} == {"size_bytes"}
        assert len(report["artifact"]["notes"]) == 2
    report = judge(str(model), suite="suite.yaml", progress=nothing).report
    assert {r["metric"] for r in report["measurements"]} >= {"acc", "perplexity"}
    assert report["artifact"]["notes"] == []


@pytest.mark.usefixtures("inline")
def test_nothing_is_reported_into_a_model_or_over_an_artifact(tiny: MakeTiny) -> None:
    model, other = tiny("llama", tied=True), tiny("llama", tied=True, seed=7)
    folder = make(model)
    kept = {p: p.read_bytes() for p in (*folder.iterdir(), *model.iterdir()) if p.is_file()}
    for target, against, out in (
        (folder, other, folder), (model, None, folder), (model, None, model), (other, model, model / "inside"),
    ):  # fmt: skip
        with pytest.raises(CompressError):
            judge(str(target), against=str(against) if against else None, suite="suite.yaml", out=out, progress=nothing)
    assert {p: p.read_bytes() for p in (*folder.iterdir(), *model.iterdir()) if p.is_file()} == kept


@pytest.mark.usefixtures("inline")
def test_an_artifact_that_is_no_longer_what_was_verified(tiny: MakeTiny) -> None:
    model = tiny("llama", tied=True)
    folder = make(model)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CompressError, match=r"model\.safetensors changed since the artifact was verified"):
        judge(str(folder), against=str(model), progress=nothing)
    make(model)  # it is made anew
    assert weights.read_bytes() == whole
    lock = (folder / "lock.json").read_bytes()
    for damage in (b"", b"[]", b'{"stages": {"compress": "x"}}'):
        (folder / "lock.json").write_bytes(damage)
        with pytest.raises(CompressError, match=r"lock\.json is missing or damaged"):
            judge(str(folder), against=str(model), progress=nothing)
    (folder / "lock.json").write_bytes(lock)
    (folder / "report.json").unlink()
    with pytest.raises(CompressError, match=r"no report\.json"):
        judge(str(folder), against=str(model), progress=nothing)


@pytest.mark.usefixtures("inline")
def test_an_interval_of_one_window_decides_nothing(tiny: MakeTiny) -> None:
    Path("plain.yaml").write_text(SUITE.split("accuracy", maxsplit=1)[0].replace("windows: 4", "windows: 1"))
    model, other = tiny("llama", tied=True), tiny("llama", tied=True, seed=7)
    report = judge(str(model), suite="plain.yaml", against=str(other), progress=nothing).report
    assert report["verdict"]["overall"] == "undecided"
    assert report["verdict"]["low"] is None


def test_a_metric_that_the_task_does_not_report(tiny: MakeTiny) -> None:
    Path("suite.yaml").write_text(SUITE.replace("{task: everyday}", "{task: everyday, metric: word_perplexity}"))
    with pytest.raises(CompressError, match="does not report 'word_perplexity'"):
        judge(str(tiny("llama", tied=True)), suite="suite.yaml", progress=nothing)
    assert not Path("evaluations").exists()


def make_mixtral(folder: Path, seed: int) -> Path:
    """A family that is not streamed."""
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = MixtralConfig(
            vocab_size=320, max_position_embeddings=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        MixtralForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("inline")
def test_an_unknown_family_whole(here: Path) -> None:
    """Alone, then against another: what cannot be streamed is loaded by transformers."""
    first, second = make_mixtral(here / "first", 1), make_mixtral(here / "second", 2)
    alone = judge(str(first), suite="suite.yaml", progress=nothing)
    assert alone.folder == Path("evaluations/first")
    assert alone.report["base"]["name"] is None
    assert {r["subject"] for r in alone.report["measurements"]} == {"artifact"}
    assert subjects(alone.report) >= {("perplexity", "artifact"), ("acc", "artifact"), ("size_bytes", "artifact")}
    assert alone.report["verdict"] is None
    assert not (alone.folder / "README.md").exists()
    page = (alone.folder / "report.html").read_text()
    assert "first" in page

    pair = judge(str(first), suite="suite.yaml", against=str(second), out=Path("pair"), progress=nothing).report
    runtimes = {r["conditions"].get("runtime") for r in pair["measurements"] if r["metric"] == "kld_mean"}
    assert runtimes == {"hf"}
    assert subjects(pair) >= {("kld_mean", "pair"), ("acc", "base"), ("recovery", "pair"), ("nll_delta", "pair")}
    same = {r["value"] for r in (*pair["measurements"], *alone.report["measurements"])
            if (r["metric"], r["subject"]) == ("perplexity", "artifact")}  # fmt: skip
    assert len(same) == 1


@pytest.mark.usefixtures("inline")
def test_other_words(tiny: MakeTiny, here: Path) -> None:
    """Models that see other tokens cannot be compared; nothing is written."""
    other = here / "other"
    shutil.copytree(tiny("llama", tied=True), other)
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["post_processor"] = None  # no <s> in front
    (other / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(CompressError, match="different tokenizers"):
        judge(str(tiny("llama", tied=True)), suite="suite.yaml", against=str(other), progress=nothing)
    assert not Path("evaluations").exists()


@pytest.mark.usefixtures("inline")
def test_from_the_command_line(tiny: MakeTiny, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("qwen3", tied=False)
    Path("plain.yaml").write_text(SUITE.split("accuracy", maxsplit=1)[0])
    capsys.readouterr()
    assert cli.main(["eval", str(model), "--suite", "plain.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["evaluation"] == f"evaluations/{model.name}"
    assert cli.main(["eval", str(model), "--suite", "plain.yaml"]) == 0
    text = capsys.readouterr().out
    assert "perplexity" in text
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main(["eval", "nowhere/at/all", "--suite", "plain.yaml"]) == 2
    assert cli.main(["eval", str(model), "--device", "cuda"]) == 2
    assert "CPU" in capsys.readouterr().err
