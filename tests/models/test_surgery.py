"""Roles resolve, and smoothing changes weights but not what a model computes."""

from typing import Any

import pytest
import torch
from conftest import FAMILY_NAMES, MakeTiny
from torch import Tensor, nn

from compress.models.family import Pair
from compress.models.load import StreamedModel, linears
from compress.models.surgery import channels, fold, fold_source, fold_targets
from tests.models.test_families import TOKENS_NT, VARIANTS, open_folder, streamed_logits, whole_logits

# Configs of a family that lay its weights out in another way.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("phi3", {"num_key_value_heads": 1}),
    ("olmo2", {"attention_bias": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("opt", {"activation_function": "gelu"}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"enable_bias": False}),
    ("falcon", {"multi_query": False, "bias": True}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"alibi": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
]


def config_of(model: StreamedModel) -> Any:
    return model.skeleton.config


def drawn(count: int, seed: int) -> Tensor:
    """Scales between a quarter and four."""
    return 4 ** (2 * torch.rand(count, generator=torch.Generator().manual_seed(seed)) - 1)


def smoothed_logits(model: StreamedModel) -> Tensor:
    """The model's logits with every pair of every block folded."""

    def block(index: int) -> nn.Module:
        module = model.block(index)
        for i, pair in enumerate(model.family.pairs_of(config_of(model))):
            count = channels(module, pair, config_of(model)).count
            fold(module, pair, drawn(count, 100 * index + i), config_of(model))
        return module

    return streamed_logits(model, TOKENS_NT, 3, block)


def check_smoothing(folder: Any) -> None:
    model = open_folder(folder)
    check_roles(model)
    wanted_NTV = whole_logits(folder, TOKENS_NT)
    assert wanted_NTV.std() > 0.1  # the comparison below is of something
    torch.testing.assert_close(smoothed_logits(model), wanted_NTV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_smoothing_keeps_logits(tiny: MakeTiny, family: str, tied: bool) -> None:
    check_smoothing(tiny(family, tied=tied))


@pytest.mark.parametrize(("family", "overrides"), OTHERS)
def test_smoothing_keeps_logits_of_other_layouts(tiny: MakeTiny, family: str, overrides: dict[str, Any]) -> None:
    check_smoothing(tiny(family, tied=True, **overrides))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_half_a_fold_changes_the_logits(tiny: MakeTiny, family: str) -> None:
    """The models of these tests would notice: every source and every target matters to the logits."""
    folder = tiny(family, tied=True)
    model, wanted_NTV = open_folder(folder), whole_logits(folder, TOKENS_NT)
    for pair in model.family.pairs_of(config_of(model)):
        for half in (fold_source, fold_targets):

            def block(index: int, pair: Pair = pair, half: Any = half) -> nn.Module:
                module = model.block(index)
                if index == 0:
                    half(module, pair, drawn(channels(module, pair, config_of(model)).count, 1), config_of(model))
                return module

            assert (streamed_logits(model, TOKENS_NT, 3, block) - wanted_NTV).abs().max() > 1e-2, (pair, half)


def check_roles(model: StreamedModel) -> None:
    """Every linear layer of a block is a target of exactly one pair, or named as one of none, with a reason."""
    block = model.skeleton.get_submodule(model.block_name(0))
    pairs, unpaired = model.family.pairs_of(config_of(model)), model.family.unpaired_of(config_of(model))
    targets = [target for pair in pairs for target in pair.targets]
    assert sorted([*targets, *unpaired]) == sorted(name for name, _, _ in linears(block))
    assert all(unpaired.values())
    order = [name for name, _ in block.named_modules()]
    for pair in pairs:
        found = channels(block, pair, config_of(model))
        source = block.get_submodule(pair.source).weight
        assert len(found.channel_I) == block.get_submodule(pair.targets[0]).in_features
        assert 0 < found.count == len(found.rows_C.unique()) <= len(source)
        assert found.rows_C.max() < len(source)
        assert set(found.channel_I.tolist()) == set(range(found.count))
        assert pair.source in order
        if source.dim() == 1:
            assert found.count == len(source)


def test_grouped_queries_share_a_channel(tiny: MakeTiny) -> None:
    """Two value heads of 16 for four query heads: columns 0 to 15 and 16 to 31 read the first."""
    model = open_folder(tiny("llama", tied=True))
    block = model.skeleton.get_submodule(model.block_name(0))
    values = next(pair for pair in model.family.pairs if pair.source.endswith("v_proj"))
    found = channels(block, values, config_of(model))
    assert found.count == 32
    assert found.channel_I.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    x_I = torch.arange(64.0)
    assert found.shared(x_I, "max").tolist() == [*range(16, 32), *range(48, 64)]
    assert found.shared(x_I, "mean").tolist() == [*range(8, 24), *range(40, 56)]
    torch.testing.assert_close(found.expand(found.shared(x_I, "max")).unflatten(0, (4, 16))[0], torch.arange(16.0, 32))
    assert found.shared(torch.ones(3, 64), "mean").shape == (3, 32)


def test_which_rows_are_meant(tiny: MakeTiny) -> None:
    model = open_folder(tiny("phi3", tied=True))
    block = model.skeleton.get_submodule(model.block_name(0))
    rows = {pair.rows: channels(block, pair, config_of(model)).rows_C for pair in model.family.pairs}
    assert rows["values_last"].tolist() == list(range(64 + 32, 64 + 64))  # four query, two key, two value heads of 16
    assert rows["second_half"].tolist() == list(range(128, 256))


def test_scales_must_fit(tiny: MakeTiny) -> None:
    model = open_folder(tiny("llama", tied=True))
    block, pair = model.block(0), model.family.pairs[0]
    for scale_C in (torch.ones(63), torch.zeros(64), torch.full((64,), float("nan"))):
        with pytest.raises(AssertionError, match="scales"):
            fold(block, pair, scale_C, config_of(model))
