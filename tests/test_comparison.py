"""`compress compare`: artifacts and other checkpoints against one base, on the same terms."""

import json
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
