"""GGUF files as llama.cpp's converter and quantizer write them, by its own Python library."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from safetensors.torch import load_file
from torch import Tensor

from compress.formats import gguf
from compress.methods.rounding import round_to_nearest
from compress.schemes import PRESETS

ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "gemma3_text": MODEL_ARCH.GEMMA3}
NAMES = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}
Kinds = Callable[[str], str]


def mixture(name: str) -> str:
    """The types of a file that mixes what can be mixed; rows are of 256 columns at least."""
    kinds = {
        "embed_tokens": "Q8_0", "lm_head": "Q6_K", "q_proj": "Q4_K", "k_proj": "Q8_0", "v_proj": "Q6_K",
        "o_proj": "F16", "gate_proj": "BF16", "up_proj": "Q5_1", "down_proj": "F32",
    }  # fmt: skip
    return next((kind for part, kind in kinds.items() if f"{part}.weight" in name), "F32")


def only(kind: str) -> Kinds:
    """Every matrix of one type."""
    return lambda name: "F32" if "norm" in name or "rope" in name or name.endswith("bias") else kind


def coded(w_OI: np.ndarray, kind: str) -> np.ndarray:
    """A weight in a type's bytes; K-quants are coded by us, since the library does not."""
    if not kind.endswith("_K"):
        return np.asarray(quants.quantize(w_OI, GGMLQuantizationType[kind]))
    args = PRESETS[kind].weights
    solved = round_to_nearest(torch.from_numpy(w_OI), None, args, scale_search=False)
    return gguf.encode("l", solved, PRESETS[kind])[f"l.{kind}"].numpy()


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter, word for word."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_file(
    model: Path,
    path: Path,
    kinds: Kinds,
    *,
    facts: Mapping[str, Any] | None = None,
    spoil: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> dict[str, Tensor]:
    """Writes a model as a GGUF file; the weights that a reader must find, by transformers' names.

    Args:
        facts: keys, below the architecture's name, in place of the model's; None leaves one out.
        spoil: changes the tensors before they are written, by transformers' names.
    """
    config = json.loads((model / "config.json").read_text())
    family = config["model_type"]
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    spoil(tensors)
    writer = GGUFWriter(path, NAMES[family])
    _describe(writer, config, dict(facts or {}))
    spelled, expected = get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"]), {}
    for name, w in tensors.items():
        kind, heads = kinds(name), re.search(r"\.([qk])_proj\.", name)
        one = family == "gemma3_text" and name.endswith("norm.weight")
        data = coded(w, kind)
        expected[name] = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[kind]).copy())
        if family == "llama" and heads:
            count = config["num_attention_heads" if heads[1] == "q" else "num_key_value_heads"]
            data = coded(permuted(w, count), kind)
        stem, _, part = name.rpartition(".")
        short = spelled.get_name(stem) or stem
        writer.add_tensor(
            f"{short}.{part}", data + np.float32(1) if one else data, raw_dtype=GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(GGUFReader(path).tensors) == len(tensors)
    return expected


def _describe(writer: GGUFWriter, config: Mapping[str, Any], facts: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rotary = config["rope_parameters"]
    rotary = rotary.get("full_attention", rotary)
    said = {
        "context_length": 512, "embedding_length": config["hidden_size"], "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"], "rope.freq_base": rotary["rope_theta"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "vocab_size": config["vocab_size"],
        "attention.key_length": config.get("head_dim"), "attention.value_length": config.get("head_dim"),
        "rope.dimension_count": config.get("head_dim"), "attention.sliding_window": config.get("sliding_window"),
        **facts,
    }  # fmt: skip
    for key, value in said.items():
        full = key if key.startswith("split.") else f"{writer.arch}.{key}"
        if isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, RopeScalingType(value).value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
