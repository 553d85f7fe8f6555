"""The Gemma 2 family: norms that multiply by 1 + w on both sides of each sublayer, soft-capped scores and logits."""

from compress.models.family import ATTENTION, GATED, UP, VALUES, ModelFamily, Pair

GEMMA2 = ModelFamily(
    model_type="gemma2",
    pairs=(
        Pair("input_layernorm", ATTENTION, plus_one=True),
        VALUES,
        Pair("pre_feedforward_layernorm", GATED, plus_one=True),
        UP,
    ),
)
