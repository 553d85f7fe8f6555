"""Conversions keep every weight, and say when they cannot."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import artifact, pipeline
from compress.convert import convert
from compress.errors import CompressError
from compress.pipeline import Outcome
from tests.conftest import MakeTiny
from tests.test_pipeline import run, write_recipe

pytestmark = pytest.mark.usefixtures("verify_here")


def silent(*_: Any) -> None:
    """No progress."""


def made(tiny: MakeTiny, words: Path, folder: Path, **step: Any) -> Path:
    """A tiny llama's artifact in groups of 32."""
    settings = {"group_size": 32, **step}
    run(write_recipe(folder, words, **settings), tiny("llama", tied=True, attention_bias=True), folder / "made")
    return folder / "made"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = artifact.open_artifact(folder)
    return {f"{i}.{k}": v for i in range(model.block_count) for k, v in model.block(i).state_dict().items()}


def assert_same(one: Path, other: Path) -> None:
    before, after = weights(one), weights(other)
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_round_the_formats_and_back(scheme: str, tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, method="awq", scheme=scheme)
    chain = [source]
    for target in ("awq", "gptq", "compressed-tensors"):
        out = convert(chain[-1], target, tmp_path / target, silent).folder
        assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == target
        assert (out / "quantize_config.json").is_file() == (target == "gptq")  # auto-gptq reads nothing else
        assert_same(source, out)
        chain.append(out)
    assert not list(tmp_path.rglob(".state"))
    pipeline.verify(  # transformers' modules compute with it too
        pipeline.Request(str(chain[1]), str(source), None, [list(range(3, 35))], True, 1)
    )


def test_the_report_keeps_what_still_holds(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, scheme="W4A16")
    out: Outcome = convert(source, "gptq", None, silent)
    assert out.folder == tmp_path / "made-gptq"
    before = json.loads((source / "report.json").read_text())
    after = out.report

    def values(document: dict[str, Any], metric: str) -> list[float]:
        return [r["value"] for r in document["measurements"] if (r["metric"], r["subject"]) == (metric, "pair")]

    assert values(after, "kld_mean") == values(before, "kld_mean") != []
    rows = {(r["metric"], r["subject"]): r["value"] for r in after["measurements"]}
    assert rows["size_bytes", "artifact"] == artifact.checkpoint_bytes(out.folder)
    assert 4.25 < rows["bpw", "artifact"] < 6  # 16 bits of scale and 4 of zero point for 32 codes, and g_idx
    assert ("compress_cpu_s", "artifact") not in rows
    assert after["artifact"]["format"] == "gptq"
    assert "converted from the format compressed-tensors: the same weights" in after["artifact"]["notes"]
    assert artifact.read_lock(out.folder)["converted"] == "compressed-tensors"
    assert "gptq" in (out.folder / "README.md").read_text()
    assert (out.folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_values_without_codes_are_rounded_and_that_is_said(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, scheme="W8A16", group_size=None)
    out = convert(source, "dense", tmp_path / "dense", silent)
    before, after = weights(source), weights(out.folder)
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
    assert not [row for row in out.report["measurements"] if row["subject"] == "pair"]  # other values: not measured
    assert out.report["verdict"] is None
    assert "rounded to bfloat16" in out.report["artifact"]["notes"][0]
    with pytest.raises(CompressError, match="not coded"):
        convert(out.folder, "gptq", tmp_path / "again", silent)


@pytest.mark.parametrize(("step", "target", "words"), [
    ({"scheme": "W3A16"}, "awq", ["4-bit", "gptq", "dense"]),
    ({"scheme": "W4A16", "actorder": "group", "fmt": "gptq"}, "compressed-tensors", ["order", "dense"]),
    ({"scheme": "W4A16"}, "compressed-tensors", ["already"]),
    ({"scheme": "W4A16"}, "gguff", ["unknown format", "gptq"]),
    ({"scheme": "W8A8", "method": "rtn", "group_size": None}, "gptq", ["activations", "none but its own"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    step: dict[str, Any],
    target: str,
    words: list[str],
    tiny: MakeTiny,
    text: Path,
    tmp_path: Path,
) -> None:
    source = made(tiny, text, tmp_path, **step)
    with pytest.raises(CompressError) as error:
        convert(source, target, tmp_path / "out", silent)
    said = "\n".join(error.value.lines())
    assert all(word in said for word in words)
    assert not (tmp_path / "out").exists()


def test_scales_that_would_be_rounded_are_refused(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """Another tool's float16 scales need more bits than compressed-tensors' bfloat16 holds."""
    source = made(tiny, text, tmp_path, scheme="W4A16", fmt="gptq")
    (source / "lock.json").unlink()
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.scales"))
    tensors[name] = torch.full_like(tensors[name], 0.1)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match="would change a weight") as error:
        convert(source, "compressed-tensors", tmp_path / "out", silent)
    assert "down_proj" in str(error.value.where)
    assert not artifact.read_lock(tmp_path / "out")
    assert convert(source, "dense", tmp_path / "out", silent).report["base"]["name"] is None  # its folder is ours


def test_no_checkpoint_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"there is no config\.json"):
        convert(tmp_path, "gptq", None, silent)


def test_what_the_config_says_and_the_weights_are(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, scheme="W4A16", fmt="gptq")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["modules_in_block_to_quantize"] = [["self_attn.q_proj"]]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompressError, match="changed since"):
        convert(source, "awq", tmp_path / "out", silent)
    (source / "lock.json").unlink()
    with pytest.raises(CompressError, match=r"does not say that .*down_proj is coded"):
        convert(source, "awq", tmp_path / "out", silent)
    with pytest.raises(CompressError, match="is coded"):
        artifact.open_artifact(source)


def test_a_conversion_that_fails_leaves_what_stood_there(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, scheme="W4A16_ASYM")
    other = convert(source, "gptq", tmp_path / "out", silent).folder
    before = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    with pytest.raises(CompressError, match="would change a weight"):
        convert(source, "gguf", other, silent)
    assert {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()} == before
    assert not (other / artifact.STATE).exists()
    convert(source, "awq", other, silent)
    assert not (other / "quantize_config.json").exists()  # of the format that stood here
    with pytest.raises(CompressError, match="was not converted"):
        convert(other, "gptq", source, silent)


def test_a_checkpoint_that_lacks_a_tensor(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny, text, tmp_path, scheme="W4A16")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "lock.json").unlink()
    with pytest.raises(CompressError, match=r"model\.norm\.weight first"):
        convert(source, "gptq", None, silent)
    (source / "config.json").write_text("{bad")
    with pytest.raises(CompressError, match="not JSON"):
        convert(source, "gptq", None, silent)


def test_codes_with_offsets_become_dense(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    run(write_recipe(tmp_path, text, scheme="W4A16_ASYM", group_size=32, fmt="gguf"), tiny("llama", tied=True),
        tmp_path / "made")  # fmt: skip
    out = convert(tmp_path / "made", "dense", tmp_path / "dense", silent).folder
    before, after = weights(tmp_path / "made"), weights(out)
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in before)
