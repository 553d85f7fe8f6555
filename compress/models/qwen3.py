"""The qwen3 family."""

from compress.models.family import ModelFamily

QWEN3 = ModelFamily(model_type="qwen3")
