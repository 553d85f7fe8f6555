"""`compress compare`: artifacts and other checkpoints against one base, on the same terms."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTiny

from compress import cli, comparison, pipeline
from compress.comparison import compare
from compress.errors import CompressError
from compress.pipeline import Outcome
from tests.test_judge import SUITE, here, inline, nothing  # noqa: F401  # fixtures

pytestmark = pytest.mark.usefixtures("inline")


def artifact(model: Path, bits: int) -> str:
    Path("suite.yaml").write_text(SUITE)
    scheme = f"W{bits}A16"
    Path(f"{scheme}.yaml").write_text(
        f"version: 1\nsummary: x\nsteps: [{{method: rtn, scheme: {scheme}, group_size: 32}}]\n"
        "evaluate: {suite: suite.yaml}\n"
    )
    return str(pipeline.run(f"{scheme}.yaml", str(model), Path(scheme), evaluate=False, progress=nothing).folder)


def test_two_artifacts_and_a_model(tiny: MakeTiny, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama", tied=True)
    targets = [artifact(model, 8), artifact(model, 2), str(tiny("llama", tied=True, seed=3))]
    assert cli.main(["compare", *targets, "--against", str(model), "--suite", "suite.yaml", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    folder = Path(said["comparison"])
    assert sorted(p.name for p in folder.iterdir()) == ["comparison.html", "comparison.json"]
    assert said["differences"] == []
    names = [line["name"] for line in said["table"]]
    assert names[1:3] == ["W8A16", "W2A16"]
    kld = [float(line["KLD"]["value"]) for line in said["table"][1:]]
    assert kld[0] < kld[1] < kld[2]
    page = (folder / "comparison.html").read_text()
    assert 'href="../../W8A16/report.html"' in page
    again = compare(targets, suite="suite.yaml", against=str(model), out=folder, force=False, progress=nothing)
    assert [name for name, _, _ in again.table.lines] == names
    text = cli.main(["compare", *targets[:2], "--against", str(model), "--suite", "suite.yaml"])
    assert text == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_was_not_measured_alike(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the reason; put together all the same where that is asked for, and said."""
    model = tiny("llama", tied=True)
    one, two = artifact(model, 8), artifact(model, 2)
    Path("other.yaml").write_text(SUITE.replace("windows: 4", "windows: 3"))
    known = comparison.judge

    def judged(target: str, **options: Any) -> Outcome:
        return known(target, **{**options, "suite": "other.yaml" if target == two else "suite.yaml"})

    monkeypatch.setattr(comparison, "judge", judged)

    def both(*, force: bool) -> comparison.Comparison:
        return compare([one, two], suite=None, against=str(model), out=None, force=force, progress=nothing)

    with pytest.raises(CompressError, match="not measured alike: perplexity") as caught:
        both(force=False)
    assert "--force" in str(caught.value.hint)
    assert any("kld_mean" in line for line in both(force=True).table.differences)


@pytest.mark.parametrize(
    ("targets", "against", "why"),
    [
        (["a"], "b", "two checkpoints"),
        (["a", "a"], "b", "named once"),
        (["a", "b"], None, "none of these is an artifact"),
    ],
)
def test_mistakes(targets: list[str], against: str | None, why: str) -> None:
    with pytest.raises(CompressError, match=why):
        compare(targets, suite=None, against=against, out=None, force=False, progress=nothing)


def test_one_place_is_one_checkpoint(tiny: MakeTiny) -> None:
    """Under whatever name: a checkpoint beside itself would say nothing."""
    made = artifact(tiny("llama", tied=True), 8)
    Path("link").symlink_to(made)
    for other in ("link", f"./{made}", str(Path(made).resolve())):
        with pytest.raises(CompressError, match="named once"):
            compare([made, other], suite=None, against=None, out=None, force=False, progress=nothing)


def test_names_are_found_before_anything_is_measured(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tiny("llama", tied=True))
    made = artifact(Path(model), 8)

    def never(target: str, **options: Any) -> Outcome:
        raise AssertionError((target, options))

    monkeypatch.setattr(comparison, "judge", never)
    with pytest.raises(CompressError, match="nowhere"):
        compare([made, "nowhere/at-all"], suite=None, against=str(model), out=None, force=False, progress=nothing)
    other = tiny("llama", tied=True, seed=3)
    with pytest.raises(CompressError, match="lies in the model's folder"):
        compare([made, str(other)], suite=None, against=str(model), out=other / "in", force=False, progress=nothing)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("windows: 4", "windows: 3"), "their recipes name different suites"),
        (("suite: suite.yaml", "suite: suite.yaml, delta: 0.02"), ""),
    ],
)
def test_terms_are_held_alike_before_anything_is_measured(
    change: tuple[str, str], why: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two suites are refused; a margin of accuracy is none of a suite without tasks."""
    model = tiny("llama", tied=True)
    one = artifact(model, 8)
    Path("other.yaml").write_text(Path("suite.yaml").read_text().replace(*change))
    recipe = Path("W8A16.yaml").read_text().replace(*change).replace("suite.yaml", "other.yaml")
    Path("two.yaml").write_text(recipe)
    two = str(pipeline.run("two.yaml", str(model), Path("two"), evaluate=False, progress=nothing).folder)
    asked: list[str] = []

    def judged(target: str, **options: Any) -> Outcome:
        del options
        asked.append(target)
        raise CompressError("measured")

    monkeypatch.setattr(comparison, "judge", judged)
    with pytest.raises(CompressError, match=why or "measured"):
        compare([one, two], suite=None, against=str(model), out=None, force=False, progress=nothing)
    assert bool(asked) == (not why)
    with pytest.raises(CompressError, match="measured"):
        compare([one, two], suite=None, against=str(model), out=None, force=True, progress=nothing)


def test_a_comparison_that_was_cut_off_goes_on(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not measured again, a lock without a report is no obstacle, nor is a half-written page."""
    model = tiny("llama", tied=True)
    one, two = artifact(model, 8), str(tiny("llama", tied=True, seed=3))
    Path("both").mkdir()
    (Path("both") / "comparison.json.tmp").write_text("{")
    made = compare([one, two], suite="suite.yaml", against=str(model), out=Path("both"), force=False, progress=nothing)
    (other,) = Path("evaluations").iterdir()
    (other / "report.json").write_text("{")  # as a kill could not leave it, and a person could
    again = compare([one, two], suite="suite.yaml", against=str(model), out=Path("both"), force=False, progress=nothing)
    assert again.table == made.table


def test_a_folder_of_something_else(tiny: MakeTiny) -> None:
    model = tiny("llama", tied=True)
    one = artifact(model, 8)
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    with pytest.raises(CompressError, match="holds something else"):
        compare([one, str(model)], suite=None, against=str(model), out=Path("mine"), force=False, progress=nothing)


def test_models_of_one_name_are_told_apart(tiny: MakeTiny, tmp_path: Path) -> None:
    """Two folders called alike: two evaluations, two lines."""
    model = tiny("llama", tied=True)
    one = artifact(model, 8)
    others = []
    for seed in (3, 4):
        folder = tmp_path / str(seed) / "mine"
        folder.parent.mkdir()
        folder.symlink_to(tiny("llama", tied=True, seed=seed))
        copied = tmp_path / f"copy{seed}" / "mine"
        shutil.copytree(folder, copied)
        others.append(str(copied))
    made = compare([one, *others], suite="suite.yaml", against=str(model), out=None, force=False, progress=nothing)
    assert list(made.reports) == ["W8A16", "mine (2 of 3)", "mine (3 of 3)"]
    first, second = (made.reports[name]["measurements"] for name in list(made.reports)[1:])
    assert first != second
    assert len(list(Path("evaluations").iterdir())) == 2


def test_weights_that_are_no_numbers(tiny: MakeTiny, tmp_path: Path) -> None:
    """Of a base and of a checkpoint: said by name, and no verdict."""
    from safetensors.torch import load_file, save_file

    model = tiny("llama", tied=True)
    one = artifact(model, 8)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match="not finite") as caught:
        compare([one, str(broken)], suite="suite.yaml", against=str(model), out=None, force=False, progress=nothing)
    assert "broken" in str(caught.value.where)
    assert "damaged" in str(caught.value.hint)
