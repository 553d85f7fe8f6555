"""Every shipped recipe on the embedded model, end to end with less calibration text: verified, and not far from it."""

from pathlib import Path

import pytest

from compress import pipeline
from compress.errors import CompressError
from compress.recipe import recipe_names

WORST = {
    "gptq-3bit": 0.6,
    "rtn-4bit": 0.6,
    "nvfp4": 0.25,
    "gptq-4bit": 0.25,
    "gguf-q4": 0.25,
    "awq-4bit": 0.25,
}  # nats; else 0.05

SUITE = """version: 1
summary: a few windows, one point
text: {dataset: embedded, windows: 4, seq_len: 256}
speed: [{batch: 1, context: 32, output: 4}]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_recipe_on_the_embedded_model(name: str, tmp_path: Path) -> None:
    suite = tmp_path / "few.yaml"
    suite.write_text(SUITE)
    changes = {"evaluate.suite": str(suite), "calibration.samples": 16, "calibration.seq_len": 256}

    def run() -> pipeline.Outcome:
        return pipeline.run(name, "smollm2-135m", tmp_path / "out", changes=changes, progress=lambda *_: None)

    if name == "fp8-block":
        with pytest.raises(CompressError, match="576"):
            run()
        return
    found = run().report
    assert found["verified"]["blocks"] == 30
    assert found["verified"]["logit_error"] < 0.1
    rows = {(r["metric"], r["subject"], r["task"]): r["value"] for r in found["measurements"]}
    assert 0 < rows["kld_mean", "pair", "heldout"] < WORST.get(name, 0.05)
    assert rows["size_bytes", "artifact", "checkpoint"] < 0.7 * rows["size_bytes", "base", "checkpoint"]
    assert any(metric == "decode_tok_s" and subject == "artifact" for metric, subject, _ in rows)
