"""The qwen2 family."""

from compress.models.family import ModelFamily

QWEN2 = ModelFamily(model_type="qwen2")
