"""The Phi-3 and Phi-4-mini family: q/k/v and gate/up are stored as one weight each."""

from compress.models.family import ModelFamily, Pair

PHI3 = ModelFamily(
    model_type="phi3",
    fused=(),
    pairs=(
        Pair("input_layernorm", ("self_attn.qkv_proj",)),
        Pair("self_attn.qkv_proj", ("self_attn.o_proj",), rows="values_last"),
        Pair("post_attention_layernorm", ("mlp.gate_up_proj",)),
        Pair("mlp.gate_up_proj", ("mlp.down_proj",), rows="second_half"),
    ),
)
