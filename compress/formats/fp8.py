"""The fine-grained FP8 checkpoint of DeepSeek-V3, transformers' FineGrainedFP8Config and vLLM: blocks of 128 × 128.

`weight` float8_e4m3fn [O, I] and `weight_scale_inv` float32 [O/128, I/128], by which the weight is multiplied (the name
is the inverse of the inverse). Activations are coded while running, in groups of 128 of each token.

Left out: blocks at an edge that 128 does not divide. transformers 5.24 infers the block from the grid of scales and
then loads such a checkpoint wrongly, or not at all.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats.base import Format
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import PRESETS, QuantArgs, Scheme

_BLOCK = 128
_SCHEME = PRESETS["FP8_BLOCK"]


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """None when the format holds the scheme, else the reason."""
    del model_type
    return None if scheme == _SCHEME else "it holds FP8_BLOCK only"


def can_mix(schemes: Collection[Scheme]) -> None:
    """It holds one scheme."""
    del schemes


def caveat(scheme: Scheme, model_type: str = "") -> str:
    """What loaders do otherwise."""
    del scheme, model_type
    return "transformers 5.24 expands the format fp8 on CPUs, and then leaves activations as they are"


def misfit(shape: tuple[int, int]) -> str | None:
    """Why a weight [O, I] cannot be stored, None when it can."""
    odd = [side for side in shape if side % _BLOCK]
    return f"{odd[0]} is no multiple of {_BLOCK}" if odd else None


def weight_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of a weight [O, I] with its blocks' scales."""
    del scheme
    return shape[0] * shape[1] + 4 * (shape[0] // _BLOCK) * (shape[1] // _BLOCK)


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight."""
    del scheme
    return {f"{name}.weight": coded.q_OI.clone(), f"{name}.weight_scale_inv": coded.scale[::_BLOCK].contiguous()}


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The coded weight of its checkpoint tensors."""
    del scheme
    why = misfit((tensors[f"{name}.weight"].shape[0], tensors[f"{name}.weight"].shape[1]))
    if why:
        raise CompressError(f"blocks at an edge are not read: {why}", where=name)
    scale_OG = tensors[f"{name}.weight_scale_inv"].float().repeat_interleave(_BLOCK, 0)
    return QuantizedWeight(tensors[f"{name}.weight"].to(torch.float8_e4m3fn), scale_OG, None)


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    return dequantize(read(name, tensors, scheme))


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> dict[str, Any]:
    """config.json's `quantization_config`; every unquantized layer is named."""
    assert kv_cache is None
    del schemes
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": sorted(ignore),
    }


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name, as a loader reads them off config.json.

    Raises:
        CompressError: other blocks, or static scales of activations.
    """
    if settings.get("weight_block_size") != [_BLOCK, _BLOCK] or settings.get("activation_scheme") != "dynamic":
        raise CompressError("only fp8 in blocks of 128 × 128 with dynamic activations is read", where="config.json")
    left = settings.get("modules_to_not_convert") or ["lm_head"]
    return {name: _SCHEME for name in linears if not any(name == part or name.startswith(f"{part}.") for part in left)}


FP8 = Format(
    name="fp8",
    loaders=("transformers", "vLLM", "SGLang"),
    can_write=can_write,
    can_mix=can_mix,
    misfit=misfit,
    weight_bytes=weight_bytes,
    caveat=caveat,
    encode=encode,
    read=read,
    decode=decode,
    config=config,
    read_config=read_config,
    parts=("weight", "weight_scale_inv"),
)
