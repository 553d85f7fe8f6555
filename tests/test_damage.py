"""Real damage is called by its name: SmolLM2 rounded to two bits is worse, and to eight bits it is as good."""

from pathlib import Path

import pytest

from compress import pipeline

SUITE = """version: 1
summary: perplexity and everyday questions
text: {dataset: embedded, windows: 8, seq_len: 256}
accuracy: {tasks: [{task: everyday, metric: acc}]}
basis: BASIS
"""
RECIPE = """version: 1
summary: round to nearest
steps: [{method: rtn, scheme: SCHEME, group_fallback: [64]}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "basis", "verdict"),
    [("W2A16", "accuracy", "worse"), ("W2A16", "perplexity", "worse"), ("W8A16", "perplexity", "non_inferior")],
)
def test_the_verdict_on_rounding(scheme: str, basis: str, verdict: str, tmp_path: Path) -> None:
    suite, recipe = tmp_path / "suite.yaml", tmp_path / "recipe.yaml"
    suite.write_text(SUITE.replace("BASIS", basis))
    recipe.write_text(RECIPE.replace("SCHEME", scheme))
    changes = {"evaluate.suite": str(suite)}
    found = pipeline.run(str(recipe), "smollm2-135m", tmp_path / "out", changes=changes, progress=lambda *_: None)
    given = found.report["verdict"]
    assert given
    assert (given["overall"], given["basis"]) == (verdict, basis)
