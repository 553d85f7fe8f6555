"""Every family, streamed block by block: the same logits as transformers' own model, names that resolve."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILY_NAMES, MakeTiny
from torch import nn

from compress.errors import CompressError
from compress.models import FAMILIES
from compress.models.load import StreamedModel, linears, open_model, skeleton, tokenizer
from compress.models.shapes import shapes_of

TOKENS_NT = torch.randint(3, 300, (3, 24), generator=torch.Generator().manual_seed(1))
VARIANTS = [(family, tied) for family in FAMILY_NAMES for tied in (True, False)]


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def open_folder(folder: Path) -> StreamedModel:
    return open_model(folder, read_config(folder))


@torch.no_grad()
def streamed_logits(model: StreamedModel, tokens_NT: torch.Tensor, batch: int) -> torch.Tensor:
    """Embedding, blocks and head by hand, as the walk does it."""
    blocks = [model.block(i) for i in range(model.block_count)]
    head, parts = model.head(), []
    for hidden_BTD, calls in model.embed(tokens_NT, batch):
        for block, arguments in zip(blocks, calls, strict=True):
            hidden_BTD = block(hidden_BTD, **arguments)  # noqa: PLW2901  # a chain
        parts.append(head(hidden_BTD))
    return torch.cat(parts)


@torch.no_grad()
def whole_logits(folder: Path, tokens_NT: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    logits: torch.Tensor = model.eval()(input_ids=tokens_NT, use_cache=False).logits
    return logits


def test_every_family_is_here() -> None:
    assert set(FAMILY_NAMES) == set(FAMILIES)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
@pytest.mark.parametrize("batch", [2, 3])  # with and without a last batch that is smaller
def test_streamed_equals_whole(tiny: MakeTiny, family: str, tied: bool, batch: int) -> None:
    folder = tiny(family, tied=tied, layers=4)
    wanted_NTV = whole_logits(folder, TOKENS_NT)
    assert wanted_NTV.std() > 0.1  # the comparison below is of something
    got_NTV = streamed_logits(open_folder(folder), TOKENS_NT, batch)
    assert got_NTV.dtype == torch.float32
    assert got_NTV.shape == (3, 24, 320)
    torch.testing.assert_close(got_NTV, wanted_NTV, rtol=1e-6, atol=2e-6)
