"""What the plan promises is what the disk gets: its bytes against the tensors of an artifact that was made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTiny
from safetensors import safe_open

from compress import job, pipeline
from compress.verify import Request


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of every tensor in a folder's safetensors files, headers not counted."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118  # no mapping
    return found


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Verification has its own tests, and costs a process."""

    def verify(request: Request) -> dict[str, Any]:
        return {"tensors": 0, "blocks": 0, "max_error": 0.0}

    monkeypatch.setattr(pipeline, "verify", verify)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))


CASES = {
    "int4 asym": ("llama", False, "{method: rtn, scheme: W4A16_ASYM, group_size: 32}", {}),
    "int3": ("qwen3", True, "{method: rtn, scheme: W3A16, group_size: 64}", {}),
    "int8, tied": ("gemma3_text", True, "{method: rtn, scheme: W8A16}", {}),
    "biases, gptq": ("qwen2", False, "{method: gptq, scheme: W4A16, group_size: 64}", {}),
    "mixed, fused weights": (
        "phi3", True,
        "{method: rtn, scheme: W2A16, group_size: 32, overrides: [{match: down_proj, scheme: W8A16}, "
        "{match: '*.0.*.o_proj', scheme: dense}]}", {},
    ),
    "odd widths": ("llama", True, "{method: rtn, scheme: W3A16, group_size: 16}", {"intermediate_size": 80}),
    "dense": ("mistral", True, "{method: rtn, scheme: W4A16, group_size: 32}\nformat: dense", {}),
}  # fmt: skip


def compress(folder: Path, step: str, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    recipe = tmp_path / "mine.yaml"
    head, _, rest = step.partition("\n")
    recipe.write_text(
        f"version: 1\nsummary: s\nsteps: [{head}]\n"
        f"calibration: {{dataset: embedded, samples: 8, seq_len: 32}}\n{rest}\n"
    )
    plan = job.prepare(str(recipe), str(folder)).plan
    out = pipeline.run(str(recipe), str(folder), tmp_path / "out", evaluate=False, progress=lambda *_: None)
    return plan.document(), out.folder


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("case", CASES)
def test_the_planned_bytes_are_the_artifacts(tiny: MakeTiny, tmp_path: Path, case: str) -> None:
    family, tied, step, overrides = CASES[case]
    base = tiny(family, tied=tied, **overrides)
    plan, folder = compress(base, step, tmp_path)
    assert plan["bytes_before"] == sum(tensor_bytes(base).values())
    stored = tensor_bytes(folder)
    assert plan["bytes_after"] == pytest.approx(sum(stored.values()), rel=0.01)
    for row in plan["rows"]:
        if row["scheme"] and plan["format"] != "dense":
            parts = [size for name, size in stored.items() if name.startswith(row["name"] + ".weight")]
            assert sum(parts) == row["bytes_after"], row["name"]


@pytest.mark.usefixtures("unverified")
def test_a_float32_checkpoint_is_not_taken_for_bfloat16(tiny: MakeTiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "float32"
    model = AutoModelForCausalLM.from_pretrained(tiny("llama", tied=False), dtype=torch.float32)
    model.save_pretrained(base)
    for path in tiny("llama", tied=False).glob("tokenizer*"):
        (base / path.name).write_bytes(path.read_bytes())
    plan, folder = compress(base, "{method: rtn, scheme: W4A16, group_size: 32}", tmp_path)
    assert plan["bytes_before"] == sum(tensor_bytes(base).values())
    assert plan["bytes_after"] == pytest.approx(sum(tensor_bytes(folder).values()), rel=0.01)
