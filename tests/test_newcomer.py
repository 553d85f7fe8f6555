"""The newcomer's path on a real model: the packaged SmolLM2-135M, the command line, plain transformers."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from compress.artifact import open_artifact
from compress.models.load import linears

ROOT = Path(__file__).parents[1]
RECIPE = """\
version: 1
summary: a quick GPTQ
steps: [{method: gptq, scheme: W4A16, group_size: 128, group_fallback: [64, 32]}]
calibration: {dataset: embedded, samples: 4, seq_len: 128}
"""


def compress(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "compress", *arguments, "--json"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_packaged_model_to_generated_text(tmp_path: Path) -> None:
    (tmp_path / "quick.yaml").write_text(RECIPE)
    out = tmp_path / "out"
    made = compress("run", str(tmp_path / "quick.yaml"), "--model", "smollm2-135m", "--out", str(out), "--no-eval")
    assert made["report"]["verified"]["blocks"] == 30
    plan = json.loads((out / "plan.json").read_text())
    assert {row["scheme"]["weights"]["group_size"] for row in plan["rows"] if row["scheme"]} == {64}
    size = (out / "model.safetensors").stat().st_size
    assert abs(size - plan["bytes_after"]) < 0.01 * size
    rows = {(r["metric"], r["subject"]): r["value"] for r in made["report"]["measurements"] if r["task"] == "heldout"}
    assert rows["perplexity", "base"] < rows["perplexity", "artifact"] < 1.5 * rows["perplexity", "base"]
    assert_transformers_generates_what_we_decode(out)


def assert_transformers_generates_what_we_decode(folder: Path) -> None:
    """Greedy text of the artifact in plain transformers, and of our own decoded weights in the plain architecture."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = open_artifact(folder)
    plain = AutoModelForCausalLM.from_config(ours.skeleton.config, dtype=torch.float32).eval()
    weights = {k: v for part in ("model",) for k, v in ours.reader(part).items()}
    missing, unexpected = plain.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    plain.tie_weights()
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    assert len([name for name, _, _ in linears(plain)]) == 30 * 7 + 1
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    with torch.no_grad():
        theirs, expected = (m.generate(**prompt, **settings)[0].tolist() for m in (model, plain))
    assert theirs == expected
    assert "Paris" in tokenizer.decode(theirs)
