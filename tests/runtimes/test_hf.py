"""The reference runtime on tiny models made here: its loop equals the model's own, its refusals read well."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CompressError
from compress.runtimes import RUNTIMES
from compress.runtimes.hf import HfRuntime
from compress.tables import resolve

TOKENS_BT = torch.tensor([[5, 17, 3, 60, 8, 11], [9, 2, 44, 31, 7, 50]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def make_tiny(path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
            initializer_range=0.3,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def runtime(folder: Path) -> HfRuntime:
    made = HfRuntime()
    made.load(folder, threads=1, dtype="float32")
    return made


def test_registered() -> None:
    assert resolve(RUNTIMES, "hf", kind="runtime") is HfRuntime


def test_prefill_is_the_last_position_of_logits(runtime: HfRuntime) -> None:
    logits_BTV = runtime.logits(TOKENS_BT)
    assert logits_BTV.shape == (2, 6, 64)
    torch.testing.assert_close(runtime.prefill(TOKENS_BT), logits_BTV[:, -1])


def test_the_cached_loop_equals_the_uncached_one(runtime: HfRuntime) -> None:
    wanted_BT = TOKENS_BT
    for _ in range(5):
        wanted_BT = torch.cat([wanted_BT, runtime.logits(wanted_BT)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(runtime.generate(TOKENS_BT, 5), wanted_BT[:, 6:])
    assert torch.equal(runtime.generate(TOKENS_BT, 1), wanted_BT[:, 6:7])


def test_decode_in_parts_is_decode_at_once(runtime: HfRuntime) -> None:
    runtime.prefill(TOKENS_BT)
    at_once_BT = runtime.decode(4)
    runtime.prefill(TOKENS_BT)
    parts = [runtime.decode(1), runtime.decode(3)]
    assert at_once_BT.shape == (2, 4)
    assert torch.equal(at_once_BT, torch.cat(parts, dim=1))


def test_dtype_and_threads_are_taken(folder: Path) -> None:
    before = torch.get_num_threads()
    runtime = HfRuntime()
    try:
        runtime.load(folder, threads=2)
        assert runtime.logits(TOKENS_BT).dtype == torch.bfloat16
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_prepare_loads_nothing_and_unload_forgets(folder: Path) -> None:
    runtime = HfRuntime()
    runtime.prepare(folder)
    with pytest.raises(AssertionError):
        runtime.logits(TOKENS_BT)
    runtime.load(folder, threads=1)
    runtime.unload()
    with pytest.raises(AssertionError):
        runtime.prefill(TOKENS_BT)


def test_compressed_tensors_runs_as_the_decompressed_weights(tmp_path: Path) -> None:
    """4-bit packed, written by the format's own library; the same weights put into the plain model."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import LlamaForCausalLM

    plain = make_tiny(tmp_path / "plain")
    packed = tmp_path / "packed"
    model: Any = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32)
    config = QuantizationConfig.model_validate({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}}},
    })  # fmt: skip
    apply_quantization_config(model, config)
    rounded = {}
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.data
            scale = weight.reshape(len(weight), -1, 16).abs().amax(-1) / 7
            module.weight_scale.data.copy_(scale)
            grid = (weight.reshape(len(weight), -1, 16) / scale[..., None]).round().clamp(-8, 7)
            rounded[f"{name}.weight"] = (grid * scale[..., None]).reshape_as(weight)
    assert rounded
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    packed.mkdir()
    save_file({key: value.contiguous() for key, value in model.state_dict().items()},
              packed / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    written = json.loads((plain / "config.json").read_text())
    written["quantization_config"] = config.model_dump(mode="json", exclude_none=True)
    (packed / "config.json").write_text(json.dumps(written))
    save_file(load_file(plain / "model.safetensors") | rounded, plain / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip

    got, wanted = HfRuntime(), HfRuntime()
    got.prepare(packed)
    got.load(packed, threads=1, dtype="float32")
    wanted.load(plain, threads=1, dtype="float32")
    torch.testing.assert_close(got.logits(TOKENS_BT), wanted.logits(TOKENS_BT), rtol=1e-4, atol=1e-4)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    runtime = HfRuntime()
    with pytest.raises(CompressError, match="bfloat16"):
        runtime.load(folder, threads=1, dtype="bfloat61")
    with pytest.raises(CompressError, match="at least 1"):
        runtime.load(folder, threads=0)
    with pytest.raises(CompressError, match=r"config\.json is missing"):
        runtime.load(tmp_path / "nowhere", threads=1)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CompressError, match="cannot load"):
        runtime.load(tmp_path, threads=1)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0broken")
    with pytest.raises(CompressError, match="cannot load"):
        runtime.load(tmp_path, threads=1)


def test_absent_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=r"layers\.1\.mlp\.up_proj"):
        HfRuntime().load(tmp_path, threads=1)
