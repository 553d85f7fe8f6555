"""The llama family."""

from compress.models.family import ModelFamily

LLAMA = ModelFamily(model_type="llama")
