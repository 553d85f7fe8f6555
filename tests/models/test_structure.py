"""Decoders of unknown families, by structure alone: as exact as the known ones, or refused with a reason."""

from pathlib import Path

import pytest
import torch
from conftest import FAMILY_NAMES, MakeTiny

from compress.errors import CompressError
from compress.models import FAMILIES
from compress.models.load import open_model, skeleton
from compress.models.structure import infer
from compress.tables import resolve
from tests.conftest import COMMON, family_settings
from tests.models.test_families import TOKENS_NT, open_folder, streamed_logits, whole_logits

UNKNOWN = ("bloom", "cohere", "glm4", "olmo", "stablelm")


@pytest.mark.parametrize("family", UNKNOWN)
def test_streamed_equals_whole(tiny: MakeTiny, family: str) -> None:
    assert family not in FAMILIES
    folder = tiny(family, tied=False, pad_token_id=2)
    model = open_folder(folder)
    assert model.family.inferred
    assert model.family.pairs == model.family.fused == ()
    wanted_NTV = whole_logits(folder, TOKENS_NT)
    torch.testing.assert_close(streamed_logits(model, TOKENS_NT, 2), wanted_NTV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_structure_finds_what_is_known(family: str) -> None:
    made = skeleton({"model_type": family, **family_settings(family, layers=3)}, "here")
    found, known = infer(made, family, "here"), resolve(FAMILIES, family, kind="family")
    for part in ("embedding", "blocks", "norm", "head", "tuples"):
        assert getattr(found, part) == getattr(known, part), part


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mixtral", "experts, or a convolution"),
        ("mamba", "experts, or a convolution"),
        ("nanochat", "no norm was found"),
        ("doge", "router_logits"),
    ],
)
def test_what_structure_does_not_tell_is_refused(model_type: str, why: str) -> None:
    config = {"model_type": model_type, **COMMON, "num_hidden_layers": 2}
    with pytest.raises(CompressError, match=f"{model_type}' is a language model .* not supported.*{why}") as caught:
        open_model(Path(), config, reader=lambda prefix: {}, where="here")
    assert all(family in caught.value.what for family in FAMILIES)
