"""compressed-tensors, `pack-quantized`: integer codes in 32-bit words, read by transformers, vLLM and SGLang.

A weight `m.weight` becomes `m.weight_packed` int32 [O, ceil(I*b/32)], `m.weight_scale` bfloat16 [O, G],
`m.weight_shape` int64 [2] and, when asymmetric, `m.weight_zero_point` int32 [ceil(O*b/32), G], packed along its
first dimension. The dense 3-bit layout is that of compressed-tensors 0.19 and later; older readers put whole
codes into a word.

Left out: int-quantized (needs quantized activations) and the float formats.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats.base import Format
from compress.numerics import QuantizedWeight, dequantize, pack_int32, unpack_int32
from compress.schemes import QuantArgs, Scheme


def import_library() -> None:
    """Imports what transformers will need of the package: slow, and better not timed."""
    import compressed_tensors.quantization  # noqa: F401


def can_write(scheme: Scheme) -> str | None:
    """None when the format holds the scheme, else the reason."""
    if scheme.input_activations is not None:
        return "quantized activations are not written yet"
    if scheme.weights.strategy == "tensor":
        return "pack-quantized holds groups and channels, not one scale for a whole tensor"
    return None


def caveat(scheme: Scheme) -> str | None:
    """Asymmetric weights load in plain transformers only when told to expand them."""
    if scheme.weights.symmetric:
        return None
    return (
        "asymmetric weights: with compressed-tensors 0.19 to 0.20.1 transformers loads them only with "
        "from_pretrained(…, quantization_config=CompressedTensorsConfig(dequantize=True))"
    )


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight."""
    bits = scheme.weights.num_bits
    tensors = {
        f"{name}.weight_packed": pack_int32(coded.q_OI, bits),
        f"{name}.weight_scale": coded.scale.to(torch.bfloat16),
        f"{name}.weight_shape": torch.tensor(coded.q_OI.shape, dtype=torch.int64),
    }
    if coded.zero is not None:
        tensors[f"{name}.weight_zero_point"] = pack_int32(coded.zero.t(), bits).t().contiguous()
    return tensors


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    bits = scheme.weights.num_bits
    out_features, in_features = tensors[f"{name}.weight_shape"].tolist()
    zero = tensors.get(f"{name}.weight_zero_point")
    coded = QuantizedWeight(
        q_OI=unpack_int32(tensors[f"{name}.weight_packed"], bits, in_features),
        scale=tensors[f"{name}.weight_scale"].float(),
        zero=None if zero is None else unpack_int32(zero.t(), bits, out_features).t(),
    )
    return dequantize(coded)


def config(schemes: Mapping[str, Scheme], ignore: list[str]) -> dict[str, Any]:
    """config.json's `quantization_config`: a group for each scheme; every unquantized layer is named."""
    kinds = list(dict.fromkeys(schemes.values()))
    groups = {}
    for i, kind in enumerate(kinds):
        targets = ["Linear"] if len(kinds) == 1 else sorted(n for n, s in schemes.items() if s == kind)
        weights = {**kind.weights.model_dump(), "observer": None}
        groups[f"group_{i}"] = {
            "targets": targets, "weights": weights, "input_activations": None, "output_activations": None,
            "format": "pack-quantized",
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name, as a loader reads them off config.json.

    Raises:
        CompressError: a group that is not packed integer weights alone.
    """
    schemes: dict[str, Scheme] = {}
    for group in settings["config_groups"].values():
        args = group.get("weights") or {}
        if group.get("input_activations") or args.get("type", "int") != "int":
            raise CompressError("only integer weights without quantized activations are read", where="config.json")
        scheme = Scheme(weights=QuantArgs(**{k: v for k, v in args.items() if k in QuantArgs.model_fields}))
        for name in linears:
            if not _named(name, settings.get("ignore") or []) and _named(name, group["targets"]):
                schemes.setdefault(name, scheme)
    return schemes


def _named(name: str, targets: list[str]) -> bool:
    """Whether targets (names, `re:` patterns, the class "Linear") name a linear layer."""
    return any(t in ("Linear", name) or (t.startswith("re:") and re.match(t[3:], name)) for t in targets)


COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    loaders=("transformers with compressed-tensors ≥ 0.20", "vLLM", "SGLang"),
    can_write=can_write,
    caveat=caveat,
    encode=encode,
    decode=decode,
    config=config,
    read_config=read_config,
    parts=("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    packs=True,
)
