"""Every family, streamed block by block: the same logits as transformers' own model, names that resolve."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILY_NAMES, MakeTiny, family_settings, save_tiny
from safetensors.torch import load_file, save_file
from torch import nn

from compress.errors import CompressError
from compress.models import FAMILIES
from compress.models.checkpoint import open_checkpoint
from compress.models.frame import output_of
from compress.models.load import StreamedModel, check_tensors, linears, open_model
from compress.models.shapes import shapes_of
from compress.models.words import tokenizer

TOKENS_NT = torch.randint(3, 300, (3, 24), generator=torch.Generator().manual_seed(1))
VARIANTS = [(family, tied) for family in FAMILY_NAMES for tied in (True, False)]


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def open_folder(folder: Path) -> StreamedModel:
    return open_model(folder, read_config(folder))


@torch.no_grad()
def streamed_logits(
    model: StreamedModel, tokens_NT: torch.Tensor, batch: int, block_of: Callable[[int], nn.Module] | None = None
) -> torch.Tensor:
    """Embedding, blocks and head by hand, as the walk does it; `block_of` gives other blocks than the model's."""
    blocks = [(block_of or model.block)(i) for i in range(model.block_count)]
    head, parts = model.head(), []
    for hidden_BTD, calls in model.embed(tokens_NT.split(batch)):
        for block, arguments in zip(blocks, calls, strict=True):
            hidden_BTD = output_of(block(hidden_BTD, **arguments))  # noqa: PLW2901  # a chain
        parts.append(head(hidden_BTD))
    return torch.cat(parts)


@torch.no_grad()
def whole_logits(folder: Path, tokens_NT: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_names_resolve(tiny: MakeTiny, family: str, tied: bool) -> None:
    model = open_folder(tiny(family, tied=tied, layers=4))
    names, skeleton = model.family, model.skeleton
    assert names.model_type == family
    assert isinstance(skeleton.get_submodule(names.embedding), nn.Embedding)
    assert isinstance(skeleton.get_submodule(names.head), nn.Linear)
    assert "Norm" in type(skeleton.get_submodule(names.norm)).__name__
    blocks = skeleton.get_submodule(names.blocks)
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) == model.block_count == 4
    assert model.block_name(3) == f"{names.blocks}.3"
    for part in itertools.chain(*names.fused):
        assert isinstance(blocks[0].get_submodule(part), nn.Linear)


def test_the_skeleton_has_no_weights_and_real_buffers(tiny: MakeTiny) -> None:
    for family in FAMILY_NAMES:
        skeleton = open_folder(tiny(family, tied=True)).skeleton
        assert all(p.is_meta for p in skeleton.parameters()), family
        buffers = dict(skeleton.named_buffers())
        assert buffers or family in ("gpt2", "opt"), family  # learned positions instead of frequencies
        assert not any(b.is_meta for b in buffers.values()), family


@pytest.mark.parametrize(("family", "tied"), VARIANTS)
def test_shapes(tiny: MakeTiny, family: str, tied: bool) -> None:
    folder = tiny(family, tied=tied)
    model = open_folder(folder)
    shapes = shapes_of(model.skeleton, model.family, read_config(folder))
    checkpoint = model.fit(open_checkpoint(folder))
    stored = checkpoint.read(list(checkpoint.files))
    weights = {name: tuple(stored[f"{name}.weight"].shape) for name, _ in shapes.linears if name != "lm_head"}
    assert dict(shapes.linears) == {**weights, "lm_head": (320, 64)}
    assert ("lm_head.weight" in stored) is not tied
    linear = sum(o * i for o, i in weights.values()) + (0 if tied else 320 * 64)
    assert shapes.other_params == sum(t.numel() for t in stored.values()) - linear
    assert (shapes.tied, shapes.block_count, shapes.max_position) == (tied, 2, 1024)
    heads = {"falcon": 1, "gpt2": 4, "gpt_neox": 4, "opt": 4}.get(family, 2)
    assert shapes.kv_bytes_per_token == 2 * 2 * 2 * heads * 16  # keys and values, bf16, layers, heads, width


def test_gemma3_mixes_attention_by_layer(tiny: MakeTiny) -> None:
    """The masks differ between layers, and the sliding one is shorter than the sequence."""
    model = open_folder(tiny("gemma3_text", tied=True, layers=4))
    _, calls = next(model.embed([TOKENS_NT[:3]]))
    wide = whole_logits(tiny("gemma3_text", tied=True, layers=4, sliding_window=64), TOKENS_NT)
    narrow = whole_logits(tiny("gemma3_text", tied=True, layers=4), TOKENS_NT)
    torch.testing.assert_close(wide[:, :8], narrow[:, :8])
    assert not torch.allclose(wide[:, 12:], narrow[:, 12:], atol=1e-3)
    cosines = [call["position_embeddings"][0] for call in calls]
    assert torch.equal(cosines[0], cosines[2])
    assert not torch.equal(cosines[0], cosines[1])  # local and global layers turn at other rates


def test_qwen2_has_biases(tiny: MakeTiny) -> None:
    block = open_folder(tiny("qwen2", tied=True)).block(0)
    biased = {name for name, _, bias in linears(block) if bias}
    assert biased == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert all(block.get_submodule(name).bias.abs().max() > 0 for name in biased)


def test_the_padding_token_in_the_text_changes_nothing(tiny: MakeTiny) -> None:
    tokens_NT = TOKENS_NT.clone()
    tokens_NT[:, 5] = 2
    folder = tiny("gemma3_text", tied=True, layers=4)
    torch.testing.assert_close(
        streamed_logits(open_folder(folder), tokens_NT, 3), whole_logits(folder, tokens_NT), rtol=1e-6, atol=2e-6
    )


def test_a_block_is_a_copy_in_float32_without_gradients(tiny: MakeTiny) -> None:
    model = open_folder(tiny("llama", tied=True))
    one = model.block(0)
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in one.parameters())
    assert not one.training
    with torch.no_grad():
        one.get_submodule("mlp.down_proj").weight.zero_()
    assert model.block(0).get_submodule("mlp.down_proj").weight.abs().max() > 0


def respelled(folder: Path, to: Path, spell: Callable[[str], str], **more: torch.Tensor) -> Path:
    """A copy of a model whose tensors have other names, and some more tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    save_file({spell(name): tensor for name, tensor in tensors.items()} | more, to / "model.safetensors")
    return to


SPELLINGS: dict[str, tuple[str, Callable[[str], str], dict[str, torch.Tensor]]] = {
    "bare GPT-2 with masks": (
        "gpt2", lambda n: n.removeprefix("transformer."), {"h.0.attn.bias": torch.ones(1, 1, 4, 4)},
    ),
    "bare OPT": ("opt", lambda n: n.removeprefix("model."), {}),
    "Pythia's head and masks": (
        "gpt_neox", lambda n: n.replace("lm_head.", "embed_out."),
        {"gpt_neox.layers.0.attention.bias": torch.ones(1), "gpt_neox.layers.1.attention.masked_bias": torch.ones(1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_checkpoints_that_spell_names_otherwise(tiny: MakeTiny, tmp_path: Path, case: str) -> None:
    family, spell, more = SPELLINGS[case]
    original = tiny(family, tied=family != "gpt_neox")
    folder = respelled(original, tmp_path / "model", spell, **more)
    model = open_folder(folder)
    check_tensors(model, open_checkpoint(folder))
    wanted_NTV = streamed_logits(open_folder(original), TOKENS_NT, 3)
    torch.testing.assert_close(streamed_logits(model, TOKENS_NT, 3), wanted_NTV, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("opt", {"word_embed_proj_dim": 32}, "projected"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("gpt2", {"add_cross_attention": True}, "encoder"),
    ],
)
def test_configs_that_a_family_refuses(family: str, overrides: dict[str, Any], why: str) -> None:
    config = {"model_type": family, **family_settings(family, 2), **overrides}
    with pytest.raises(CompressError, match=f"this '{family}' model is not supported: .*{why}"):
        open_model(Path(), config, reader=lambda prefix: {}, where="here")


def test_weights_of_another_architecture_are_refused(tiny: MakeTiny) -> None:
    config = read_config(tiny("qwen2", tied=True))
    folder = tiny("llama", tied=True)
    with pytest.raises(CompressError, match="bias is missing") as caught:
        check_tensors(open_model(folder, config), open_checkpoint(folder))
    assert caught.value.where == str(folder)


def test_an_unknown_family_names_the_known(tiny: MakeTiny) -> None:
    folder = tiny("llama", tied=True)
    with pytest.raises(CompressError, match="unknown model family 'lama'; did you mean 'llama'") as caught:
        open_model(folder, {**read_config(folder), "model_type": "lama"})
    assert caught.value.where == str(folder)


def test_the_tokenizer_beside_the_model(tiny: MakeTiny) -> None:
    words = tokenizer(tiny("llama", tied=True))
    ids = words("aß\n")["input_ids"]
    assert ids[0] == words.bos_token_id == 0
    assert len(ids) == 1 + 4
    assert words.decode(ids[1:]) == "aß\n"
    assert len(words) <= 320


def test_the_same_arguments_give_the_same_model(tiny: MakeTiny, tmp_path: Path) -> None:
    first = tiny("llama", tied=True)
    again = save_tiny(tmp_path, "llama", tied=True, layers=2, seed=0)
    assert tiny("llama", tied=True) == first
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    other = tiny("llama", tied=True, seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
