"""The command line: exit codes, what goes to which stream, and that help costs nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTiny

from compress import cli, job, pipeline
from compress.recipe import recipe_names

RECIPE = """version: 1
summary: eight bits
steps: [{method: rtn, scheme: W8A16}]
calibration: {samples: 4, seq_len: 32}
"""


def run_apart(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The real program in a process of its own."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "COMPRESS_CACHE": str(cwd / "cache"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "compress", *map(str, arguments)], capture_output=True, text=True, check=False,
        cwd=cwd, env=environment,
    )  # fmt: skip


def one_document(stdout: str) -> Any:
    """The output as one JSON document; anything else beside it fails."""
    assert stdout.count("\n") == 1
    assert stdout.endswith("\n")
    return json.loads(stdout)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return str(tmp_path / "mine.yaml")


# ---- help


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["plan", "--help"], ["report", "--help"], ["models", "-h"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom compress.cli import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'yaml', 'rich', 'huggingface_hub'}\n"
        "sys.stderr.write(' '.join(sorted(heavy & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(cli.__file__).parents[1])  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.startswith("usage: compress")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in ("run", "plan", "report", "recipes", "models"))


# ---- one JSON document


@pytest.mark.usefixtures("offline")
def test_run_and_its_report(tiny: MakeTiny, recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    """For real, with the folder that it chooses by itself; nothing but the document reaches the streams."""
    model = tiny("llama", tied=True)
    capfd.readouterr()  # what making the model said
    assert cli.main(["run", recipe, "--model", str(model), "--no-eval", "--json"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    document = one_document(said.out)
    folder = Path("artifacts") / f"{model.name}--mine"
    assert document == {"artifact": str(folder), "report": json.loads((folder / "report.json").read_text())}
    assert document["report"]["verified"]["blocks"] == 2
    rows = {(row["metric"], row["subject"]) for row in document["report"]["measurements"]}
    assert rows >= {("perplexity", "base"), ("kld_mean", "pair"), ("compress_cpu_s", "artifact")}

    assert cli.main(["report", str(folder), "--json"]) == 0
    assert one_document(capfd.readouterr().out) == document["report"]
    assert cli.main(["report", str(folder)]) == 0
    text = capfd.readouterr().out
    assert text.startswith(f"{folder.name}: int8 sym channel\n")
    assert "verified: 2 blocks reopened, largest error 0.0e+00" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("offline")
def test_plan_json_and_text(tiny: MakeTiny, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", recipe, "--model", str(tiny("qwen3", tied=False))]
    assert cli.main([*arguments, "--json"]) == 0
    document = one_document(capsys.readouterr().out)
    assert document["recipe"] == "mine"
    assert document["refusals"] == []
    assert len(document["rows"]) == 2 * 7 + 1
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"mine on {document['model']}, ")
    assert "int8 sym channel" in text


def test_recipes_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "--json"]) == 0
    document = one_document(capsys.readouterr().out)
    assert [recipe["name"] for recipe in document] == recipe_names()
    assert all(recipe["steps"][0]["method"] and recipe["summary"] for recipe in document)
    assert cli.main(["recipes"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(any(line.split()[0] == r["name"] and r["summary"][:30] in line for line in lines) for r in document)
    costs = {recipe["name"]: recipe["cost"] for recipe in document}
    assert (costs["gptq-4bit"]["calibration_tokens"], costs["gptq-4bit"]["suite"]) == (64 * 512, "embedded")
    assert 4.12 < costs["gptq-4bit"]["bits_per_weight"] < 4.13  # sixteen bits of scale for 128 weights
    assert costs["rtn-int8"]["calibration_tokens"] == 0
    assert "4.13 bits a weight (0.26 of bfloat16); 32,768 calibration" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.usefixtures("offline")
def test_models_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    document = {model["name"]: model for model in one_document(capsys.readouterr().out)}
    assert document["llama3-8b"]["repo"] == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert document["llama3-8b"]["gated"] is True
    assert document["smollm2-135m"]["package"]
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(document)
    assert max(map(len, lines)) <= 80


# ---- mistakes: the table of them is in test_mistakes.py


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_refused_plan_is_shown_and_fails(tiny: MakeTiny, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Path("refused.yaml").write_text(RECIPE.replace("W8A16}", "W8A16, group_size: 96}"))
    arguments = ["plan", "refused.yaml", "--model", str(tiny("llama", tied=True))]
    assert cli.main(arguments + ["--json"] * as_json) == 2
    shown = capsys.readouterr().out
    refusals = one_document(shown)["refusals"] if as_json else [" ".join(shown.split("REFUSED")[1].split())]
    assert len(refusals) == 1
    assert "group_size 96 does not divide" in refusals[0]


@pytest.mark.parametrize(
    "arguments",
    [[], ["compres"], ["run", "gptq-4bit"], ["run", "--model", "x"], ["plan", "a", "--model", "b", "--no"],
     ["run", "a", "--model", "b", "--threads", "many"]],
)  # fmt: skip
def test_wrong_usage_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: compress" in said.err


def test_the_program_itself_ends_with_the_code(tmp_path: Path) -> None:
    done = run_apart("report", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted_is_130(
    as_json: bool, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any, progress: Any, **kwargs: Any) -> None:
        progress("blocks", 1, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupt)
    assert cli.main(["run", recipe, "--model", "llama3-8b"] + ["--json"] * as_json) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert "the same command goes on from there" in said.err


@pytest.mark.usefixtures("offline")
def test_a_fault_of_ours_keeps_its_traceback(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("invariant")

    monkeypatch.setattr(job, "prepare", broken)
    with pytest.raises(AssertionError, match="invariant"):
        cli.main(["plan", recipe, "--model", "llama3-8b"])


def test_a_reader_that_leaves_early_is_no_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "compress", "recipes", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
                          cwd=Path(cli.__file__).parents[1])  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
