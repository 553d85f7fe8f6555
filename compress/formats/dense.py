"""Dense bfloat16: the quantized model's values in an ordinary checkpoint, loaded by everything, no smaller.

For studying what a scheme does to a model where no runtime reads its codes.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import QuantArgs, Scheme, weight_bytes


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """Every weight scheme; quantized activations have nowhere to be said."""
    del model_type
    return "it has no words for quantized activations" if scheme.input_activations else None


def can_mix(schemes: Collection[Scheme]) -> None:
    """Nothing is said of schemes, so any may stand beside any."""
    del schemes


def caveat(scheme: Scheme, model_type: str = "") -> None:
    """Loaders need to be told nothing."""
    del scheme, model_type


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """The weight's values, bfloat16 [O, I]."""
    del scheme
    return {f"{name}.weight": dequantize(coded).to(torch.bfloat16)}


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> None:
    """It keeps values, not codes."""
    del name, tensors, scheme


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I]."""
    del scheme
    return tensors[f"{name}.weight"].float()


def _weight_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    del scheme
    return weight_bytes(None, shape)


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> None:
    """An ordinary checkpoint says nothing of quantization."""
    del schemes, ignore, kv_cache


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Nothing is coded."""
    del settings, linears
    return {}


DENSE = Format(
    name="dense",
    loaders=("everything",),
    can_write=can_write,
    can_mix=can_mix,
    weight_bytes=_weight_bytes,
    caveat=caveat,
    encode=encode,
    read=read,
    decode=decode,
    config=config,
    read_config=read_config,
    parts=("weight",),
    transposed=True,
    packs=False,
)
