"""The Gemma 3 family, its text decoder: its norms multiply by 1 + w, and stand on both sides of each sublayer."""

from compress.models.family import ATTENTION, GATED, UP, VALUES, ModelFamily, Pair

GEMMA3_TEXT = ModelFamily(
    model_type="gemma3_text",
    pairs=(
        Pair("input_layernorm", ATTENTION, plus_one=True),
        VALUES,
        Pair("pre_feedforward_layernorm", GATED, plus_one=True),
        UP,
    ),
)
