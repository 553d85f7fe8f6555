"""The OLMo 2 family: norms stand behind attention and MLP, and on queries and keys; none stands before them."""

from compress.models.family import ATTENTION, GATED, UP, VALUES, ModelFamily

_WHY = "it reads the residual itself: no norm stands before it"

OLMO2 = ModelFamily(
    model_type="olmo2", pairs=(VALUES, UP), unpaired=tuple((name, _WHY) for name in (*ATTENTION, *GATED))
)
