"""The mistral family."""

from compress.models.family import ModelFamily

MISTRAL = ModelFamily(model_type="mistral")
