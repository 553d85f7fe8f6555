"""What an on-disk format is: a pair of pure codecs, a predicate and the words for config.json."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from compress.errors import CompressError
from compress.numerics import LEAST_HALF, QuantizedWeight, dequantize
from compress.schemes import QuantArgs, Scheme
from compress.shards import StoredTensor

INPUT_SCALE = "input_scale"  # the part of a coded weight that holds its inputs' static scale


def no_cache(settings: Mapping[str, Any]) -> None:
    """The `read_cache` of formats without words for a quantized cache."""
    del settings


def no_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `files` of formats that config.json says all of."""
    del settings
    return {}


def refuses_none(config: Mapping[str, Any], folder: Path | None) -> None:
    """The `refuses` of formats that hold every model whose weights they hold."""
    del config, folder


def fits(shape: tuple[int, int]) -> None:
    """The `misfit` of formats that hold any shape."""
    del shape


def unread_by_none(scheme: Scheme) -> tuple[str, ...]:
    """The `unread` of a format whose loaders read all that it holds."""
    del scheme
    return ()


@dataclass(frozen=True)
class Format:
    """One way to lay coded weights down in safetensors files.

    Attributes:
        name: as recipes say it.
        loaders: programs that read it as it is; `read_by` leaves out those that do not read given schemes.
        can_write: (scheme, model_type) None when the scheme fits, else why not.
        can_mix: None when one checkpoint may hold all of several schemes, else why not.
        misfit: why a weight of shape [O, I] cannot be stored, None when it can.
        weight_bytes: bytes of a coded weight of shape [O, I], scales and all.
        caveat: (scheme, model_type) what a loader needs to be told, None for nothing.
        encode: (module name, coded weight, scheme) to checkpoint tensors.
        read: (module name, checkpoint tensors, scheme) to the coded weight; None where no codes are kept.
        decode: (module name, checkpoint tensors, scheme) to the float32 weight [O, I].
        config: (schemes by module name, unquantized linear layers, the coding of the cache) to config.json's
            `quantization_config`; None when there is none.
        read_cache: quantization_config to how keys and values are coded in the cache; None when they are not.
        holds_cache: whether it has words for a quantized cache.
        read_config: the inverse of `config`: (quantization_config, names of all linear layers) to schemes by name.
        files: quantization_config to other files that old loaders read, by name; plain data, written as JSON.
        parts: names, below the module's, of the tensors that stand for a coded weight and its inputs' static scale.
        packs: whether coded weights take less room on disk.
        refuses: (the config as transformers understands it, the model's folder where it is here) why its loaders would
            not compute this model, or not read its tokenizer; None when they do.
        unread: the loaders that do not read a scheme, though the format holds it.
        close: writes the whole checkpoint into a folder, in a file of its own kind: (folder, the model's tensors by
            their modules' names, the config likewise, the folder of the tokenizer, the model's name); None for
            safetensors.
        transposed: whether its loaders read layers that checkpoints store as [I, O] (GPT-2's Conv1D).
    """

    name: str
    loaders: tuple[str, ...]
    can_write: Callable[[Scheme, str], str | None]
    can_mix: Callable[[Collection[Scheme]], str | None]
    weight_bytes: Callable[[Scheme, tuple[int, int]], int]
    caveat: Callable[[Scheme, str], str | None]
    encode: Callable[[str, QuantizedWeight, Scheme], dict[str, Tensor]]
    read: Callable[[str, Mapping[str, Tensor], Scheme], QuantizedWeight | None]
    decode: Callable[[str, Mapping[str, Tensor], Scheme], Tensor]
    config: Callable[[Mapping[str, Scheme], list[str], QuantArgs | None], dict[str, Any] | None]
    read_config: Callable[[Mapping[str, Any], list[str]], dict[str, Scheme]]
    parts: tuple[str, ...]
    read_cache: Callable[[Mapping[str, Any]], QuantArgs | None] = no_cache
    files: Callable[[Mapping[str, Any]], dict[str, Any]] = no_files
    misfit: Callable[[tuple[int, int]], str | None] = fits
    refuses: Callable[[Mapping[str, Any], Path | None], str | None] = refuses_none
    unread: Callable[[Scheme], Collection[str]] = unread_by_none
    close: Callable[[Path, Sequence[StoredTensor], Mapping[str, Any], Path, str], None] | None = None
    packs: bool = True
    transposed: bool = False
    holds_cache: bool = False

    def read_by(self, schemes: Collection[Scheme]) -> tuple[str, ...]:
        """The loaders that read a checkpoint of these schemes."""
        return tuple(name for name in self.loaders if not any(name in self.unread(scheme) for scheme in schemes))


_MOST_CHANGE = 0.01
DECODED = "speed and memory are measured here with weights decoded to the model's dtype"


def with_half_scales(name: str, coded: QuantizedWeight) -> QuantizedWeight:
    """The coded weight with its scales in float16's range and precision.

    Raises:
        CompressError: that changes the weight by more than a hundredth: it is too small, or too large.
    """
    scale = coded.scale.clamp_min(LEAST_HALF).half().float()
    rounded = dataclasses.replace(coded, scale=scale)
    if torch.equal(scale, coded.scale):
        return rounded
    w_OI = dequantize(coded)
    change = float((dequantize(rounded) - w_OI).norm() / w_OI.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if not change <= _MOST_CHANGE:
        size = "small" if bool(scale.isfinite().all()) else "large"
        raise CompressError(
            f"its weights are too {size} for scales in float16, which this format stores", where=name,
            hint="use the format compressed-tensors or dense, or leave the layer out (ignore)",
        )  # fmt: skip
    return rounded


def thirty_twos(shape: tuple[int, int]) -> str | None:
    """The `misfit` of layouts in whole words: 32 divides both sides."""
    odd = [side for side in shape if side % 32]
    return f"{odd[0]} is no multiple of 32" if odd else None


def integer_scheme(settings: Mapping[str, Any], *, symmetric: bool, actorder: bool = False) -> Scheme:
    """The scheme of a `quantization_config` that says `bits` and `group_size` (-1: by channel).

    Raises:
        CompressError: one of them is missing or makes no sense.
    """
    size = settings.get("group_size")
    grain = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    order = {"actorder": "group"} if actorder and size != -1 else {}
    try:
        args = {"num_bits": settings.get("bits"), "symmetric": symmetric, **grain, **order}
        return Scheme.model_validate({"weights": args})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CompressError(f"this quantization is not read: {why}", where="config.json") from error
