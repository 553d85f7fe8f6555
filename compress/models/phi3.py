"""The Phi-3 and Phi-4-mini family: q/k/v and gate/up are stored as one weight each."""

from compress.models.family import ModelFamily

PHI3 = ModelFamily(model_type="phi3", fused=())
