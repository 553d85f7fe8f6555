"""What kind of model a config describes, in words, so that a refusal says more than "unknown".

A model type that no family knows is still known to transformers, whose tables of classes tell a masked language
model from a translator or a vision model. Nothing is imported of the classes themselves. A causal language model of
an unknown family passes here: its structure may be enough (structure.py).
"""

from collections.abc import Mapping
from typing import Any

from compress.errors import CompressError, nearest
from compress.models import FAMILIES

_TABLES = (  # the first that names the type; many types are in several
    ("a multimodal model (it sees or hears as well as reads)", ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")),
    ("a speech or audio model", ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM")),
    ("a vision model", ("IMAGE", "IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "OBJECT_DETECTION")),
    ("an encoder–decoder", ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("an encoder (a masked language model)", ("MASKED_LM", "TEXT_ENCODING")),
    (None, ("CAUSAL_LM",)),
)
_HEADS = ("ForCausalLM", "LMHeadModel")
OTHER_MODEL = "give a decoder-only language model of one of these families; `compress models` lists some"


def unsupported(model_type: str, why: str, where: str) -> CompressError:
    """The refusal of a causal language model of an unknown family."""
    return CompressError(
        f"{model_type!r} is a language model of a family that is not supported, and its structure does not tell "
        f"enough: {why}; the families are {', '.join(sorted(FAMILIES))}",
        where=where,
        hint=OTHER_MODEL,
    )


def check_kind(config: Mapping[str, Any], where: str) -> None:
    """Refuses what is no decoder-only language model.

    Raises:
        CompressError: it is not; says what it is instead, and the families.
    """
    model_type = str(config.get("model_type", ""))
    families = ", ".join(sorted(FAMILIES))
    if model_type in FAMILIES:
        _check_head(config, where)
        return
    known, kind = _kind(model_type, config)
    if known and kind is None:
        _check_head(config, where)
        return
    if kind is None:
        hint = "correct `model_type` in config.json, or give a model of one of these families"
        if config.get("auto_map"):
            hint = "give a model of one of these families; code that comes with a model (auto_map) is never run"
        raise CompressError(
            f"unknown model family {model_type!r}; {nearest(model_type, FAMILIES)}", where=where, hint=hint
        )
    hint = OTHER_MODEL
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in FAMILIES:
        hint = f"save its text part alone as a checkpoint ({text['model_type']}), and give that"
    raise CompressError(
        f"{model_type!r} is {kind}; only decoder-only language models are compressed, of the families {families}",
        where=where,
        hint=hint,
    )


def _kind(model_type: str, config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether transformers knows a type, and as what, where that is not a causal language model."""
    from transformers.models.auto import modeling_auto

    if isinstance(config.get("vision_config"), dict) or isinstance(config.get("audio_config"), dict):
        return True, _TABLES[0][0]
    for kind, tables in _TABLES:
        if any(model_type in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}) for table in tables):
            return True, kind
    known = getattr(modeling_auto, "MODEL_MAPPING_NAMES", {})
    return (True, "no language model") if model_type in known else (False, None)


def _check_head(config: Mapping[str, Any], where: str) -> None:
    """A family's classifiers and embedding models share its type, and have another head or none."""
    named = config.get("architectures")
    if isinstance(named, list) and named and not any(str(name).endswith(_HEADS) for name in named):
        raise CompressError(
            f"{named[0]} is no language model: it has another head than …{_HEADS[0]}, or none",
            where=where,
            hint="give the language model that it was made from",
        )
