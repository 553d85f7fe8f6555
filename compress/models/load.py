"""Models read piece by piece: a skeleton without weights, and one block's weights at a time.

The skeleton is the model's own transformers class with every parameter on the meta device and every buffer
real (rotary frequencies, Gemma's embedding scale), so that nothing of a layer is imitated. Weights are read
with `pread`, since pages of a mapped file would count as memory.

Checkpoints may spell names otherwise than the modules do, and GPT-2's store linear weights as [I, O]. Both end at
`StreamedModel.fit` and `StreamedModel.stored`: everything between sees modules' names and weights [O, I].

Left out: checkpoints whose weights are cut or stacked otherwise than the modules'; remote code.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from compress.errors import CompressError
from compress.models import FAMILIES
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.family import ModelFamily
from compress.models.files import check_weights
from compress.models.frame import Call, Head, inner_name, run_frame
from compress.models.kinds import OTHER_MODEL, check_kind
from compress.models.structure import infer
from compress.models.words import check_generation, tokenizer
from compress.numerics import has_bf16_matrix_unit
from compress.tables import resolve

_DERIVED = ".rotary_emb.inv_freq"  # older checkpoints store it; the architecture computes it


def check_tensors(model: "StreamedModel", stored: Checkpoint) -> None:
    """Holds the headers of the weights against the architecture, before any work.

    Raises:
        CompressError: a tensor is missing, is not the architecture's, or has another shape or dtype than it should.
    """
    checkpoint = model.fit(stored)
    expected = {name: tuple(tensor.shape) for name, tensor in model.skeleton.state_dict().items()}
    head = f"{model.family.head}.weight"
    if model.skeleton.config.tie_word_embeddings and head not in checkpoint.files:  # type: ignore[union-attr]
        expected.pop(head)
    odd = sorted(name for name in set(expected) ^ set(checkpoint.files) if not name.endswith(model.ignored))
    wrong = [f"{name} is {'missing' if name in expected else 'unknown'}" for name in odd]
    for file in sorted(set(checkpoint.files.values())):
        with safe_open(checkpoint.folder / file, framework="pt", backend="pread") as handle:
            for name in sorted(n for n in expected if checkpoint.files.get(n) == file):
                found = handle.get_slice(checkpoint.spelled.get(name, name))
                shape = found.get_shape()[::-1] if name in checkpoint.transposed else found.get_shape()
                if tuple(shape) != expected[name]:
                    wrong.append(f"{name} is {shape}, config.json says {list(expected[name])}")
                elif found.get_dtype() not in ("BF16", "F16", "F32"):
                    wrong.append(f"{name} is stored as {found.get_dtype()}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CompressError(
            f"the weights are not those of the architecture: {'; '.join(wrong[:3])}{more}",
            where=str(checkpoint.folder),
            hint="check that config.json and the weights belong together and are not quantized already",
        )


def check_files(model: "StreamedModel", folder: Path) -> Any:
    """Holds a model's folder to what a run needs of it, headers only; its tokenizer.

    Raises:
        CompressError: the weights are not there, not whole or another architecture's; no tokenizer, or none that
            can be read; a generation config that cannot.
    """
    check_weights(folder)
    check_tensors(model, open_checkpoint(folder))
    check_generation(folder)
    return tokenizer(folder)


def text_config(config: Mapping[str, Any], where: str) -> Any:
    """The transformers config object of a decoder-only language model.

    Raises:
        CompressError: not a supported architecture.
    """
    from transformers import AutoConfig

    check_kind(config, where)
    model_type = config["model_type"]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        hint = "write float32, bfloat16 or float16"
        raise CompressError(f"config.json names an unknown dtype, {dtype!r}", where=where, hint=hint)
    settings = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config", "dtype")}
    with _readable_config(where):
        made = AutoConfig.for_model(model_type, **settings)
    if made.num_hidden_layers < 1:
        hint = "correct num_hidden_layers"
        raise CompressError("config.json does not describe a model: it has no blocks", where=where, hint=hint)
    made._attn_implementation = "sdpa" if _supports_sdpa(made) else "eager"
    return made


def _supports_sdpa(config: Any) -> bool:
    """Whether the architecture computes attention by torch's own kernel; Gemma 2 caps its scores and cannot."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return bool((classes[0] if isinstance(classes, tuple) else classes)._supports_sdpa)


@contextmanager
def _readable_config(where: str) -> Iterator[None]:
    """What transformers says of a config that makes no model, as ours."""
    from huggingface_hub.errors import StrictDataclassError

    mistakes = (
        ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError, RuntimeError, AssertionError,
        StrictDataclassError,
    )  # fmt: skip
    try:
        yield
    except mistakes as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        hint = "correct config.json, or copy the model's own again"
        raise CompressError(f"config.json does not describe a model: {said}", where=where, hint=hint) from error


def family(model_type: str, where: str) -> ModelFamily:
    """The family of a config's `model_type`.

    Raises:
        CompressError: unknown; the known ones are named.
    """
    found = resolve(FAMILIES, model_type, kind="model family", where=where)
    assert isinstance(found, ModelFamily)
    return found


class TransposedLinear(nn.Linear):
    """A linear layer whose weight lies in checkpoints as [I, O]: in place of transformers' Conv1D."""


def _without_conv1d(model: nn.Module) -> None:
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inside, outside = module.weight.shape
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, TransposedLinear(inside, outside, device="meta"))


def skeleton(config: Mapping[str, Any], where: str) -> nn.Module:
    """The model's own class with meta parameters and real buffers, in evaluation mode.

    Linear layers that are stored transposed become `TransposedLinear`s.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # its own types are partly wrong
    made = text_config(config, where)
    with _readable_config(where), init_empty_weights(include_buffers=False):
        model: nn.Module = auto.from_config(made, dtype=torch.float32)
    _without_conv1d(model)
    return model.eval()


class Reader(Protocol):
    """Gives a module's tensors in float, by name; formats decode on the way."""

    def __call__(self, prefix: str) -> dict[str, Tensor]: ...


def plain_reader(checkpoint: Checkpoint) -> Reader:
    """Reads tensors that are stored as they are."""
    return lambda prefix: checkpoint.read(checkpoint.below(prefix))


@dataclass(frozen=True)
class StreamedModel:
    """A model of which at most a block is in memory.

    Attributes:
        skeleton: see `skeleton`.
        family: names of its parts.
        reader: gives the tensors of a module.
    """

    skeleton: nn.Module
    family: ModelFamily
    reader: Reader

    @property
    def block_count(self) -> int:
        return len(self._blocks)

    @property
    def _blocks(self) -> nn.ModuleList:
        blocks = self.skeleton.get_submodule(self.family.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    @property
    def resolved(self) -> dict[str, Any]:
        """The config as transformers understands it: defaults filled in, old spellings in their new places."""
        settings: Any = self.skeleton.config
        return dict(settings.to_dict())

    @property
    def transposed(self) -> frozenset[str]:
        """Weights that lie in checkpoints as [I, O]."""
        modules = self.skeleton.named_modules()
        return frozenset(f"{name}.weight" for name, module in modules if isinstance(module, TransposedLinear))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of the names of tensors that may lie in checkpoints and are no part of the model."""
        return (_DERIVED, *self.family.ignored)

    def fit(self, stored: Checkpoint) -> Checkpoint:
        """A checkpoint as it lies on the disk, by the names and shapes of the model's modules."""
        names = self.family.module_tensors(stored.files)
        return Checkpoint(
            stored.folder,
            {names[name]: file for name, file in stored.files.items()},
            {new: old for old, new in names.items() if new != old},
            self.transposed,
        )

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model's modules by the names and shapes that they have in a checkpoint."""
        turned = self.transposed & set(tensors)
        return {
            self.family.stored_tensor(name): tensor.t().contiguous() if name in turned else tensor
            for name, tensor in tensors.items()
        }

    def block_name(self, index: int) -> str:
        return f"{self.family.blocks}.{index}"

    def block(self, index: int) -> nn.Module:
        """Block `index` with its weights, float32, without gradients."""
        return self._filled(self._blocks[index], self.block_name(index))

    def _filled(self, module: nn.Module, name: str) -> nn.Module:
        filled = copy.deepcopy(module)
        stored = self.reader(name).items()
        tensors = {k[len(name) + 1 :]: v.float() for k, v in stored if not k.endswith(self.ignored)}
        assert set(tensors) == set(filled.state_dict()), f"{name}: check_tensors comes first"
        for key, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CompressError("a weight holds values that are not finite", where=f"{name}.{key}")
        filled.load_state_dict(tensors, assign=True)
        return filled.requires_grad_(False).eval()

    def embed(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Call]]]:
        """Inputs of the first block, float32 [B, T, D], and the keyword arguments of every block, by batches [B, T].

        Runs the model's own forward around stubs of its blocks, so that masks and rotary embeddings are whatever
        the family makes of them. Only the embedding's rows that the tokens name are kept.
        """
        used = torch.unique(torch.cat([tokens_BT.flatten() for tokens_BT in batches]))
        (weight,) = self.reader(self.family.embedding).values()
        embedding: Any = copy.deepcopy(self.skeleton.get_submodule(self.family.embedding))
        embedding.weight = nn.Parameter(weight[used].float(), requires_grad=False)
        embedding.padding_idx = None  # it would point outside the rows that were kept
        del weight
        parts = {name: self._filled(module, f"{inner_name(self.family)}.{name}") for name, module in self._others()}
        parts[self.family.embedding.rsplit(".", 1)[1]] = embedding
        parts[self.family.norm.rsplit(".", 1)[1]] = nn.Identity()
        for tokens_BT in batches:
            calls: list[Call] = []

            def record(hidden_BTD: Tensor, call: Call, calls: list[Call] = calls) -> Any:
                calls.append(call)
                return (hidden_BTD,) if self.family.tuples else hidden_BTD

            rows_BT = torch.searchsorted(used, tokens_BT)
            yield run_frame(self.skeleton, self.family, parts, rows_BT, record), calls

    def _others(self) -> Iterator[tuple[str, nn.Module]]:
        """What lies beside the blocks and has weights, but for embedding and norm: learned positions."""
        inner = self.skeleton.get_submodule(inner_name(self.family))
        known = [part.rsplit(".", 1)[1] for part in (self.family.embedding, self.family.blocks, self.family.norm)]
        for name, module in inner.named_children():
            if name not in known and module.state_dict():
                yield name, module

    def check_ends(self) -> None:
        """Reads what is no block once, one at a time.

        Raises:
            CompressError: one holds values that are not finite (blocks are held to that as they are read).
        """
        others = [f"{inner_name(self.family)}.{name}" for name, _ in self._others()]
        for part in (self.family.embedding, self.family.norm, self.family.head, *others):
            for name, tensor in self.reader(part).items():
                if not bool(torch.isfinite(tensor).all()):
                    raise CompressError("a weight holds values that are not finite", where=name)

    def head(self) -> nn.Module:
        """The model from the last block's output on: norm, projection and whatever the family adds.

        Called with hidden states [B, T, D]; returns logits float32 [B, T, V].
        """
        tied = bool(getattr(self.skeleton.config, "tie_word_embeddings", False))
        norm = self._filled(self.skeleton.get_submodule(self.family.norm), self.family.norm)
        name = self.family.head
        tensors = self.reader(name)
        if f"{name}.weight" not in tensors and tied:
            tensors = {f"{name}.weight": self.reader(self.family.embedding)[f"{self.family.embedding}.weight"]}
        projection = copy.deepcopy(self.skeleton.get_submodule(name))
        projection.load_state_dict({k[len(name) + 1 :]: v.float() for k, v in tensors.items()}, assign=True)
        return Head(self.skeleton, self.family, norm, projection.requires_grad_(False))


def open_model(
    folder: Path, config: Mapping[str, Any], reader: Reader | None = None, where: str | None = None
) -> StreamedModel:
    """A checkpoint folder as a streamed model.

    Args:
        reader: gives modules' tensors; by default they are as stored in `folder`.
        where: what errors name, by default the folder.
    """
    place = where or str(folder)
    made = skeleton(config, place)
    found = _family_of(made, config, place)
    model = StreamedModel(made, found, reader or _nothing)
    if reader is None:
        model = replace(model, reader=plain_reader(model.fit(open_checkpoint(folder))))
    return model


def _nothing(prefix: str) -> dict[str, Tensor]:
    raise AssertionError(f"no weights are there yet, asked for {prefix}")


def _family_of(made: nn.Module, config: Mapping[str, Any], where: str) -> ModelFamily:
    """The family of a config's type, or what the structure of its skeleton tells."""
    model_type = str(config["model_type"])
    if model_type not in FAMILIES:
        return infer(made, model_type, where)
    found = family(model_type, where)
    why = found.refuses(made.config)
    if why is not None:
        raise CompressError(f"this {model_type!r} model is not supported: {why}", where=where, hint=OTHER_MODEL)
    return found


def linears(model: nn.Module) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Every linear layer: its name, weight shape [O, I] and whether it has a bias."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, (module.out_features, module.in_features), module.bias is not None


def hush() -> None:
    """Keeps transformers' log lines and progress bars out of a program's output."""
    from transformers.utils import logging

    log: Any = logging  # untyped
    log.set_verbosity_error()
    log.disable_progress_bar()


def calibration_dtype() -> torch.dtype:
    """bfloat16 where the CPU multiplies its tiles in hardware; elsewhere float32 is as fast and more exact."""
    return torch.bfloat16 if has_bf16_matrix_unit() else torch.float32
