"""The GPT-2 family: learned positions, and linear layers whose weights are stored as [I, O]."""

from compress.models.family import ModelFamily, Pair

GPT2 = ModelFamily(
    model_type="gpt2",
    embedding="transformer.wte",
    blocks="transformer.h",
    norm="transformer.ln_f",
    fused=(),
    pairs=(
        Pair("ln_1", ("attn.c_attn",)),
        Pair("attn.c_attn", ("attn.c_proj",), rows="values_last"),
        Pair("ln_2", ("mlp.c_fc",)),
    ),
    unpaired=(("mlp.c_proj", "its input comes out of an activation that no scale passes through"),),
    ignored=(".attn.bias", ".attn.masked_bias"),
    refuses=lambda config: "it attends to an encoder (add_cross_attention)" if config.add_cross_attention else None,
)
