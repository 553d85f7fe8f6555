"""The Falcon family, whose config chooses between three ways to lay queries, keys and values out in one weight.

All three put each key head's queries, key and value together. One norm feeds attention and MLP (7B), or each has
its own (40B), or they follow each other as in other families.
"""

from compress.models.family import ModelFamily, Pair

_QKV, _UP = "self_attention.query_key_value", "mlp.dense_h_to_4h"
_PARALLEL, _IN_TURN = ("parallel_attn", (True,)), ("parallel_attn", (False,))
_TWO, _ONE = ("num_ln_in_parallel_attn", (2,)), ("num_ln_in_parallel_attn", (1, None))

FALCON = ModelFamily(
    model_type="falcon",
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    norm="transformer.ln_f",
    fused=(),
    pairs=(
        Pair("ln_attn", (_QKV,), when=(_PARALLEL, _TWO)),
        Pair("ln_mlp", (_UP,), when=(_PARALLEL, _TWO)),
        Pair("input_layernorm", (_QKV, _UP), when=(_PARALLEL, _ONE)),
        Pair("input_layernorm", (_QKV,), when=(_IN_TURN,)),
        Pair(_QKV, ("self_attention.dense",), rows="values_by_group"),
        Pair("post_attention_layernorm", (_UP,), when=(_IN_TURN,)),
    ),
    unpaired=(("mlp.dense_4h_to_h", "its input comes out of an activation that no scale passes through"),),
    tuples=True,
)
