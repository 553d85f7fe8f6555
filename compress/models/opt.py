"""The OPT family: learned positions, biases everywhere, and ReLU, through which a positive scale passes.

Left out: OPT-350M, which norms behind its sublayers and projects its embeddings.
"""

from typing import Any

from compress.models.family import ModelFamily, Pair

_AFFINE = ("layer_norm_elementwise_affine", (True,))


def _refused(config: Any) -> str | None:
    if config.word_embed_proj_dim != config.hidden_size:
        return "its embeddings are projected (word_embed_proj_dim is not hidden_size), as OPT-350M's are"
    if not config.do_layer_norm_before or config._remove_final_layer_norm:
        return "its norms stand behind attention and MLP (do_layer_norm_before is false), or the last one is missing"
    return None


OPT = ModelFamily(
    model_type="opt",
    embedding="model.decoder.embed_tokens",
    blocks="model.decoder.layers",
    norm="model.decoder.final_layer_norm",
    fused=(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),),
    pairs=(
        Pair("self_attn_layer_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), when=(_AFFINE,)),
        Pair("self_attn.v_proj", ("self_attn.out_proj",)),
        Pair("final_layer_norm", ("fc1",), when=(_AFFINE,)),
        Pair("fc1", ("fc2",), when=(("activation_function", ("relu",)),)),
    ),
    unpaired=(
        *((f"self_attn.{name}_proj", "the norm before it has no weight") for name in "qkv"),
        ("fc1", "the norm before it has no weight"),
        ("fc2", "its input comes out of an activation that no scale passes through"),
    ),
    refuses=_refused,
)
