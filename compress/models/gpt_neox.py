"""The GPT-NeoX and Pythia family: attention and MLP side by side, each head's query, key and value together."""

from compress.models.family import ModelFamily, Pair

GPT_NEOX = ModelFamily(
    model_type="gpt_neox",
    embedding="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    norm="gpt_neox.final_layer_norm",
    fused=(),
    pairs=(
        Pair("input_layernorm", ("attention.query_key_value",)),
        Pair("attention.query_key_value", ("attention.dense",), rows="values_by_group"),
        Pair("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ),
    unpaired=(("mlp.dense_4h_to_h", "its input comes out of an activation that no scale passes through"),),
    renamed=(("embed_out.", "lm_head."),),
    ignored=(".attention.bias", ".attention.masked_bias"),
)
