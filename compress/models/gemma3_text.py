"""The Gemma 3 family, its text decoder."""

from compress.models.family import ModelFamily

GEMMA3_TEXT = ModelFamily(model_type="gemma3_text")
