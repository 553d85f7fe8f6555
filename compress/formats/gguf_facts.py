"""What a GGUF file says of a model's architecture, in llama.cpp's keys; and what of a config llama.cpp cannot compute.

llama.cpp rotates neighbouring channels in its architecture `llama`, transformers the two halves of a head, so query and
key rows of Llamas and Mistrals change places. It adds nothing to Gemma's norms, which transformers multiplies by 1 + w,
so these are stored with the one added.

Configs are as transformers understands them (`PreTrainedConfig.to_dict`), not as config.json spells them: there the
same is said in many ways, and defaults differ by family.

Source: llama.cpp's own converter and loader (facts, not code), as of 2026-10.

Left out: sliding windows outside Gemma 3 (llama.cpp has none for these architectures; a Mistral's context is cut to its
window, within which they are the same); rotary scalings other than linear, Llama 3's and YaRN.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
_PATTERN = 6  # of Gemma 3's blocks every sixth sees everything; llama.cpp has that built in, as the local theta
_LOCAL_THETA = 10_000.0
_THETA = 10_000.0
_ROTATIONS = ("default", "linear", "yarn", "llama3")
_YARN_EXTRAS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_GEMMA_27B_BLOCKS = 62  # whose scores llama.cpp scales by the hidden size, not by the head's


def rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters (Gemma 3: of blocks that see everything)."""
    said = config["rope_parameters"]
    return dict(said.get("full_attention", said))


def head_size(config: Mapping[str, Any]) -> int:
    """Channels of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def refusal(config: Mapping[str, Any]) -> str | None:
    """What of a model llama.cpp does not compute as transformers does; None when there is nothing."""
    said = rotation(config)
    kind = said["rope_type"]
    if kind == "yarn" and (odd := [key for key in _YARN_EXTRAS if said.get(key) is not None]):
        return f"its YaRN scaling sets {odd[0]}, which is not written"
    known = _ROTATIONS if ARCHITECTURES[config["model_type"]] == "llama" else _ROTATIONS[:-1]
    if kind not in known:
        return f"its rotary embedding is of the kind {kind!r}; {', '.join(known)} are written for it"
    checks = {"qwen2": _refusal_of_qwen, "qwen3": _refusal_of_qwen, "gemma3_text": _refusal_of_gemma}
    check = checks.get(config["model_type"])
    activation = config.get("hidden_activation") or config["hidden_act"]
    wanted = "gelu_pytorch_tanh" if config["model_type"] == "gemma3_text" else "silu"
    if activation != wanted:
        return f"llama.cpp computes this architecture with {wanted}, not {activation}"
    return check(config) if check else None


def _refusal_of_qwen(config: Mapping[str, Any]) -> str | None:
    if config.get("use_sliding_window"):
        return "it uses a sliding window, which llama.cpp does not have for Qwen"
    qwen2 = config["model_type"] == "qwen2"
    if qwen2 and head_size(config) * config["num_attention_heads"] != config["hidden_size"]:
        return "its heads together are not as wide as the model, which llama.cpp takes for granted of Qwen 2"
    odd = not qwen2 and config.get("attention_bias")
    return "its attention has biases, which llama.cpp does not know of Qwen 3" if odd else None


def _refusal_of_gemma(config: Mapping[str, Any]) -> str | None:
    blocks = int(config["num_hidden_layers"])
    pattern = ["full_attention" if (i + 1) % _PATTERN == 0 else "sliding_attention" for i in range(blocks)]
    if config["layer_types"] != pattern:
        return "its blocks alternate otherwise than every sixth seeing everything, which llama.cpp takes for granted"
    local = config["rope_parameters"]["sliding_attention"]
    if local["rope_theta"] != _LOCAL_THETA or local["rope_type"] != "default":
        return f"its local rotary embedding has theta {local['rope_theta']:g}; llama.cpp takes 10000 for granted"
    size = config["hidden_size"] // config["num_attention_heads"] if blocks == _GEMMA_27B_BLOCKS else head_size(config)
    if config["query_pre_attn_scalar"] != size:
        return f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}; llama.cpp takes {size} for granted"
    unknown = ("attn_logit_softcapping", "final_logit_softcapping", "attention_bias", "use_bidirectional_attention")
    odd = [key for key in unknown if config.get(key)]
    return f"it has {odd[0]}, which llama.cpp does not know of Gemma 3" if odd else None


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens within which llama.cpp computes what transformers does."""
    longest = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    return min(longest, int(window)) if window and config["model_type"] == "mistral" else longest


def describe(writer: Any, config: Mapping[str, Any]) -> None:
    """Adds the architecture's keys to a GGUFWriter."""
    heads, size, rotary = int(config["num_attention_heads"]), head_size(config), rotation(config)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_rope_freq_base(float(rotary["rope_theta"]))
    writer.add_rope_dimension_count(size)
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(int(config["sliding_window"]))
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(_scaling_type(rotary["rope_type"]))
        writer.add_rope_scaling_factor(float(rotary["factor"]))
    if rotary["rope_type"] == "yarn":
        before = rotary.get("original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(int(before))


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `describe` says of a config: keys of the architecture to numbers and texts."""
    from gguf import GGUFWriter

    writer = GGUFWriter(None, ARCHITECTURES[config["model_type"]])
    describe(writer, config)
    return {key: said.value for key, said in writer.kv_data[0].items()}


def understood(said: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """A file's facts, and what llama.cpp takes for granted where it says nothing."""
    heads = said.get(f"{architecture}.attention.head_count", 1)
    size = said.get(f"{architecture}.embedding_length", 0) // heads
    assumed = {
        "attention.head_count_kv": heads, "attention.key_length": size, "attention.value_length": size,
        "rope.dimension_count": said.get(f"{architecture}.attention.key_length", size),
        "rope.freq_base": _THETA, "rope.scaling.type": "none",
    }  # fmt: skip
    return {**{f"{architecture}.{key}": value for key, value in assumed.items()}, **said}


def _scaling_type(name: str) -> Any:
    from gguf import RopeScalingType

    return RopeScalingType(name)


def frequency_factors(config: Mapping[str, Any]) -> Tensor | None:
    """What Llama 3's scaling divides each rotary frequency by, float32 [head/2]; None without that scaling.

    Long wavelengths are stretched by `factor`, short ones left, those between interpolated.
    """
    said = rotation(config)
    if said["rope_type"] != "llama3":
        return None
    factor, low, high = (float(said[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    before, size = float(said["original_max_position_embeddings"]), head_size(config)
    frequency = said["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = before * frequency / (2 * math.pi)  # within the context that the model was first trained on
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    factors_F: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors_F.float()


def heads_of(module: str, config: Mapping[str, Any]) -> int | None:
    """Heads whose rows change places in a layer's weight and bias; None where they stay."""
    if ARCHITECTURES[config["model_type"]] != "llama":
        return None
    heads = int(config["num_attention_heads"])
    found = {"q_proj": heads, "k_proj": int(config["num_key_value_heads"])}
    return found.get(module.rsplit(".", 1)[-1])


def rotated(heads: int, rows: int) -> Tensor:
    """Which of a layer's rows stand where in the file: the halves of each head alternate, int64 [rows]."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)


def adds_one(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a weight is stored with one added."""
    return config["model_type"] == "gemma3_text" and module.endswith("norm")
