"""AutoAWQ's checkpoint, version GEMM: 4-bit integers in groups, with zero points.

A linear layer [O, I] is stored transposed: `qweight` int32 [I, O/8] and `qzeros` int32 [G, O/8] hold eight unsigned
4-bit codes a word along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up; `scales` float16
[G, O]. Zero points are stored as they are; symmetric weights have 8.

Left out: the versions GEMV, GEMV fast and Marlin, which lay the same numbers out for other kernels.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats.base import DECODED, Format, integer_scheme, thirty_twos, with_half_scales
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import QuantArgs, Scheme

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code stands at each place of a word


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """None when the format holds the scheme, else the reason."""
    del model_type
    args = scheme.weights
    if scheme.input_activations is not None:
        return "it has no words for quantized activations"
    if args.type != "int" or args.num_bits != 4 or args.strategy != "group":
        return "it holds 4-bit integers in groups"
    return "its groups follow the columns' order" if args.actorder else None


def can_mix(schemes: Collection[Scheme]) -> str | None:
    """None when one checkpoint may hold all of the schemes, else the reason."""
    return "its config says one group size for all layers" if len(schemes) > 1 else None


def caveat(scheme: Scheme, model_type: str = "") -> str:
    """What loaders need."""
    del scheme, model_type
    return f"transformers reads the format awq with the package gptqmodel; {DECODED}"


def weight_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of a weight [O, I]: codes, and a zero point and a scale for each group of each row."""
    out_features, in_features = shape
    groups = in_features // scheme.weights.span(in_features)
    return out_features * in_features // 2 + groups * out_features * 5 // 2


def pack(code: Tensor) -> Tensor:
    """int32 [R, C/8] of unsigned 4-bit codes [R, C]."""
    ordered = code.to(torch.int64).view(len(code), -1, 8)[..., list(_ORDER)]
    word = (ordered << (4 * torch.arange(8))).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def unpack(word: Tensor) -> Tensor:
    """Inverse of `pack`: uint8 [R, C]."""
    ordered = (word.unsqueeze(-1) >> (4 * torch.arange(8, dtype=torch.int32))) & 15
    code = torch.empty_like(ordered)
    code[..., list(_ORDER)] = ordered
    return code.flatten(1).to(torch.uint8)


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight."""
    del scheme
    assert coded.g_idx_I is None, "the plan refuses groups in the columns' order"
    coded = with_half_scales(name, coded)
    zero_OG = torch.zeros_like(coded.scale, dtype=torch.int8) if coded.zero is None else coded.zero
    return {
        f"{name}.qweight": pack(coded.q_OI.t() + 8),
        f"{name}.qzeros": pack(zero_OG.t() + 8),
        f"{name}.scales": coded.scale.half().t().contiguous(),
    }


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The coded weight of its checkpoint tensors."""
    q_OI, zero_OG = (
        (unpack(tensors[f"{name}.{part}"]).t().to(torch.int8) - 8).contiguous() for part in ("qweight", "qzeros")
    )
    scale_OG = tensors[f"{name}.scales"].float().t().contiguous()
    return QuantizedWeight(q_OI, scale_OG, None if scheme.weights.symmetric else zero_OG)


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    return dequantize(read(name, tensors, scheme))


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> dict[str, Any]:
    """config.json's `quantization_config`. The head is never quantized, and loaders know."""
    assert kv_cache is None
    (scheme,) = dict.fromkeys(schemes.values())
    left = sorted(name for name in ignore if "." in name)
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": scheme.weights.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": left or None,
    }


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name, as a loader reads them off config.json.

    Raises:
        CompressError: a version that is not read.
    """
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise CompressError(f"awq version {settings['version']!r} is not read", where="config.json")
    scheme = integer_scheme(settings, symmetric=False)
    left = settings.get("modules_to_not_convert") or []
    return {name: scheme for name in linears if "." in name and not any(part in name for part in left)}


AWQ = Format(
    name="awq",
    loaders=("transformers with gptqmodel", "vLLM", "SGLang", "TGI", "autoawq"),
    can_write=can_write,
    can_mix=can_mix,
    misfit=thirty_twos,
    weight_bytes=weight_bytes,
    caveat=caveat,
    encode=encode,
    read=read,
    decode=decode,
    config=config,
    read_config=read_config,
    parts=("qweight", "qzeros", "scales"),
)
