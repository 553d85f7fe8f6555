"""compressed-tensors: what transformers, vLLM and SGLang read, in five of its layouts.

Of a weight [O, I] in G groups `m.weight` becomes

| layout | tensors |
|---|---|
| pack-quantized (integers) | `weight_packed` int32 [O, ceil(I*b/32)], `weight_scale` bfloat16 [O, G], `weight_shape` int64 [2]; asymmetric: `weight_zero_point` int32 [ceil(O*b/32), G], packed along its first dimension |
| int-quantized (8 bits, quantized inputs) | `weight` int8 [O, I], `weight_scale` bfloat16 [O, 1] or [1] |
| float-quantized (E4M3) | `weight` float8_e4m3fn [O, I], `weight_scale` bfloat16 [O, 1], [1] or [O/128, I/128] |
| nvfp4-pack-quantized | `weight_packed` uint8 [O, I/2], `weight_scale` float8_e4m3fn [O, I/16], `weight_global_scale` float32 [1] |
| mxfp4-pack-quantized | `weight_packed` uint8 [O, I/2], `weight_scale` uint8 [O, I/32], exponents biased by 127 |

and static inputs have `input_scale` bfloat16 [1]; a quantized cache has `k_scale` and `v_scale` bfloat16 [1] below its
attention layer. A value is `code * weight_scale`, in NVFP4
`code * (weight_scale / weight_global_scale)`; codes of inputs are multiplied by `input_scale`. Layers that runtimes fuse
must agree in scales of a whole tensor: they are solved together, so they do.

The dense 3-bit layout of pack-quantized is that of compressed-tensors 0.19 and later; older readers put whole codes
into a word. Where a model holds several layouts, each group of config.json names its own.

Left out: quantized activations of NVFP4 and MXFP4, sparsity, transforms.
"""  # noqa: E501  # a table has long rows

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from compress.errors import CompressError
from compress.formats.base import INPUT_SCALE, Format
from compress.numerics import (
    QuantizedWeight,
    dequantize,
    pack_e8m0,
    pack_fp4,
    pack_int32,
    unpack_e8m0,
    unpack_fp4,
    unpack_int32,
)
from compress.schemes import KV_CACHES, QuantArgs, Scheme, weight_bytes

_SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}  # the package's words, where not bfloat16


def import_library() -> None:
    """Imports what transformers will need of the package: slow, and better not timed."""
    import compressed_tensors.quantization  # noqa: F401


def layout(scheme: Scheme) -> str:
    """The package's name for how a scheme's tensors lie on disk."""
    w = scheme.weights
    if w.type == "int":
        return "pack-quantized" if scheme.input_activations is None else "int-quantized"
    return {"bfloat16": "float-quantized", "e4m3": "nvfp4-pack-quantized", "e8m0": "mxfp4-pack-quantized"}[w.scale_kind]


# Families whose own layers transformers initialises by their weights, before it has expanded these.
EXPANDED_ONLY = frozenset({"falcon"})


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """None when the format holds the scheme, else the reason."""
    if scheme.weights.actorder:
        return "its groups follow the columns' order; use `actorder: static`"
    if model_type in EXPANDED_ONLY and scheme.input_activations is not None:
        return f"transformers 5.24 loads a quantized {model_type} only expanded, and then activations are not quantized"
    if scheme.weights.strategy == "super_group":
        return "it has no words for super-groups (K-quants)"
    if layout(scheme) == "pack-quantized" and scheme.weights.strategy == "tensor":
        return "pack-quantized holds groups and channels, not one scale for a whole tensor"
    return None


def can_mix(schemes: Collection[Scheme]) -> str | None:
    """None when one checkpoint may hold all of the schemes, else the reason."""
    if len(schemes) > 1 and not all(s.weights.symmetric for s in schemes):
        return (
            "asymmetric weights beside another scheme: transformers has to expand the former while loading, "
            "and then takes every layer for the same scheme"
        )
    return None


def caveat(scheme: Scheme, model_type: str = "") -> str | None:
    """What plain transformers needs to be told, or does otherwise."""
    if not scheme.weights.symmetric or model_type in EXPANDED_ONLY:
        what = "asymmetric weights" if not scheme.weights.symmetric else f"a quantized {model_type}"
        return (
            f"{what}: with compressed-tensors 0.19 to 0.20.1 transformers 5.24 loads it only with "
            "from_pretrained(…, quantization_config=CompressedTensorsConfig(dequantize=True))"
        )
    if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
        return (
            "4-bit floats: compressed-tensors 0.20.1 expands them to bfloat16, whatever the model's dtype; "
            "plain transformers runs them with dtype=torch.bfloat16 only"
        )
    if scheme.input_activations is not None:
        return (
            "quantized activations: transformers rounds them as the format says, after it has expanded the weights; "
            "with CompressedTensorsConfig(dequantize=True) it leaves them as they are"
        )
    return None


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight."""
    assert coded.g_idx_I is None, "the plan refuses groups in the columns' order"
    args, kind = scheme.weights, layout(scheme)
    scale = coded.scale
    if kind == "pack-quantized":
        tensors = {
            "weight_packed": pack_int32(coded.q_OI, args.num_bits),
            "weight_scale": scale.to(torch.bfloat16),
            "weight_shape": torch.tensor(coded.q_OI.shape, dtype=torch.int64),
        }
        if coded.zero is not None:
            tensors["weight_zero_point"] = pack_int32(coded.zero.t(), args.num_bits).t().contiguous()
    elif kind == "nvfp4-pack-quantized":
        assert coded.global_scale is not None
        local = (scale * coded.global_scale).to(torch.float8_e4m3fn)
        tensors = {"weight_packed": pack_fp4(coded.q_OI), "weight_scale": local}
        tensors["weight_global_scale"] = coded.global_scale.clone()  # a file's tensors share no memory
    elif kind == "mxfp4-pack-quantized":
        tensors = {"weight_packed": pack_fp4(coded.q_OI), "weight_scale": pack_e8m0(scale)}
    else:
        if args.block_structure:
            scale = scale[:: args.block_structure[0]].contiguous()
        scale = scale.view(1) if args.strategy == "tensor" else scale
        tensors = {"weight": coded.q_OI.clone(), "weight_scale": scale.to(torch.bfloat16)}
    if coded.input_scale is not None:
        tensors[INPUT_SCALE] = coded.input_scale.to(torch.bfloat16)
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    return dequantize(read(name, tensors, scheme))


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The coded weight of its checkpoint tensors."""
    args, kind = scheme.weights, layout(scheme)
    scale, inputs = tensors[f"{name}.weight_scale"], tensors.get(f"{name}.{INPUT_SCALE}")
    input_scale = None if inputs is None else inputs.float()
    if kind == "pack-quantized":
        out_features, in_features = tensors[f"{name}.weight_shape"].tolist()
        zero = tensors.get(f"{name}.weight_zero_point")
        return QuantizedWeight(
            q_OI=unpack_int32(tensors[f"{name}.weight_packed"], args.num_bits, in_features),
            scale=scale.float(),
            zero=None if zero is None else unpack_int32(zero.t(), args.num_bits, out_features).t(),
            input_scale=input_scale,
        )
    if kind == "nvfp4-pack-quantized":
        total = tensors[f"{name}.weight_global_scale"].float()
        q_OI = unpack_fp4(tensors[f"{name}.weight_packed"])
        return QuantizedWeight(q_OI, scale.float() / total, None, global_scale=total, input_scale=input_scale)
    if kind == "mxfp4-pack-quantized":
        return QuantizedWeight(
            unpack_fp4(tensors[f"{name}.weight_packed"]), unpack_e8m0(scale), None, input_scale=input_scale
        )
    scale = scale.float().view(-1, 1) if args.strategy == "tensor" else scale.float()
    rows = args.block_structure[0] if args.block_structure else 1
    return QuantizedWeight(tensors[f"{name}.weight"], scale.repeat_interleave(rows, 0), None, input_scale=input_scale)


def _said(args: QuantArgs | None) -> dict[str, Any] | None:
    """A tensor's coding in the package's words."""
    if args is None:
        return None
    said = {**args.model_dump(mode="json"), "observer": None}
    if args.block_structure is None:
        del said["block_structure"]
    del said["actorder"]
    if args.scale_kind in _SCALE_DTYPES:
        said["scale_dtype"] = _SCALE_DTYPES[args.scale_kind]
    return said


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> dict[str, Any]:
    """config.json's `quantization_config`: a group for each scheme; every unquantized layer is named."""
    kinds = list(dict.fromkeys(schemes.values()))
    groups = {}
    for i, kind in enumerate(kinds):
        targets = ["Linear"] if len(kinds) == 1 else sorted(n for n, s in schemes.items() if s == kind)
        groups[f"group_{i}"] = {
            "targets": targets, "weights": _said(kind.weights),
            "input_activations": _said(kind.input_activations), "output_activations": None, "format": layout(kind),
        }  # fmt: skip
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": _said(kv_cache),
        "global_compression_ratio": None,
    }


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name, as a loader reads them off config.json.

    Raises:
        CompressError: a group that codes weights or activations in a way that is not read.
    """
    schemes: dict[str, Scheme] = {}
    for group in settings["config_groups"].values():
        scheme = _read_scheme(group)
        if layout(scheme) != (group.get("format") or settings.get("format")):
            raise CompressError(f"{scheme.text} in the layout {group.get('format')} is not read", where="config.json")
        for name in linears:
            if not _named(name, settings.get("ignore") or []) and _named(name, group["targets"]):
                schemes.setdefault(name, scheme)
    return schemes


def read_cache(settings: Mapping[str, Any]) -> QuantArgs | None:
    """How keys and values are coded in the cache.

    Raises:
        CompressError: in another way than with one static FP8 scale each.
    """
    said = settings.get("kv_cache_scheme")
    if said is None:
        return None
    for args in KV_CACHES.values():
        known = args.model_dump(mode="json").items()
        if all(said.get(key) == value for key, value in known if value is not None):
            return args
    raise CompressError("this quantization of the cache is not read", where="config.json")


def _read_scheme(group: Mapping[str, Any]) -> Scheme:
    parts = {}
    for part in ("weights", "input_activations"):
        said = group.get(part)
        order = (said or {}).get("actorder")
        if order in ("group", "dynamic"):
            raise CompressError(f"groups in the columns' order (actorder {order}) are not read", where="config.json")
        parts[part] = said and {
            k: v for k, v in said.items() if k in QuantArgs.model_fields and v is not None and k != "actorder"
        }
    try:
        return Scheme.model_validate(parts)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CompressError(f"this quantization is not read: {why}", where="config.json") from error


def _named(name: str, targets: list[str]) -> bool:
    """Whether targets (names, `re:` patterns, the class "Linear") name a linear layer."""
    return any(t in ("Linear", name) or (t.startswith("re:") and re.match(t[3:], name)) for t in targets)


def unread(scheme: Scheme) -> tuple[str, ...]:
    """The kernels of vLLM and SGLang for packed integers read 4 and 8 bits, by channel or in groups of 32, 64, 128."""
    args = scheme.weights
    if scheme.input_activations is not None or args.type != "int":
        return ()
    fits = args.num_bits in (4, 8) and (args.strategy == "channel" or args.group_size in (32, 64, 128))
    return () if fits else ("vLLM", "SGLang")


COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    loaders=("transformers with compressed-tensors ≥ 0.20", "vLLM", "SGLang"),
    can_write=can_write,
    can_mix=can_mix,
    weight_bytes=weight_bytes,
    caveat=caveat,
    encode=encode,
    read=read,
    decode=decode,
    config=config,
    read_config=read_config,
    read_cache=read_cache,
    parts=(
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_global_scale",
        INPUT_SCALE,
    ),
    holds_cache=True,
    unread=unread,
)
