"""AutoGPTQ's checkpoint, version 1: the layout that most runtimes of integer weights read.

A linear layer [O, I] is stored transposed: `qweight` int32 [I·b/32, O] and `qzeros` int32 [G, O·b/32] are dense strings
of b-bit codes along their first and last dimension, lowest bits first (a 3-bit code may straddle two words); `scales`
float16 [G, O]; `g_idx` int32 [I] names the group of each column. Codes are unsigned. Version 1 stores every zero point
less one, and loaders add the one again, so the smallest zero point is 1; symmetric weights have 2^(b−1).

Left out: version 2, which stores zero points as they are; mixtures of schemes, which GPTQModel alone reads.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats.base import DECODED, Format, integer_scheme, thirty_twos, with_half_scales
from compress.numerics import QuantizedWeight, dequantize, pack_int32, unpack_int32
from compress.schemes import QuantArgs, Scheme

_BITS = (2, 3, 4, 8)


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """None when the format holds the scheme, else the reason."""
    del model_type
    args = scheme.weights
    if scheme.input_activations is not None:
        return "it has no words for quantized activations"
    if args.type != "int" or args.num_bits not in _BITS or args.strategy not in ("group", "channel"):
        return "it holds integers of 2, 3, 4 or 8 bits, in groups or by channel"
    return None


def can_mix(schemes: Collection[Scheme]) -> str | None:
    """None when one checkpoint may hold all of the schemes, else the reason."""
    return "its config says one width and one group size for all layers" if len(schemes) > 1 else None


def caveat(scheme: Scheme, model_type: str = "") -> str:
    """What loaders need."""
    del scheme, model_type
    return f"transformers reads the format gptq with the packages optimum and gptqmodel; {DECODED}"


def weight_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of a weight [O, I]: codes, a zero point and a scale for each group of each row, the columns' groups."""
    (out_features, in_features), bits = shape, scheme.weights.num_bits
    groups = in_features // scheme.weights.span(in_features)
    return out_features * in_features * bits // 8 + groups * out_features * (16 + bits) // 8 + 4 * in_features


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight."""
    bits = scheme.weights.num_bits
    zero_OG = torch.zeros_like(coded.scale, dtype=torch.int8) if coded.zero is None else coded.zero
    if bool((zero_OG == scheme.weights.qmin).any()):
        raise CompressError("a zero point is the smallest code, which the format gptq cannot say", where=name)
    coded, in_features = with_half_scales(name, coded), coded.q_OI.shape[1]
    g_idx_I = coded.g_idx_I
    if g_idx_I is None:
        g_idx_I = torch.arange(in_features, dtype=torch.int32) // scheme.weights.span(in_features)
    return {
        f"{name}.qweight": pack_int32(coded.q_OI, bits).t().contiguous(),
        f"{name}.qzeros": pack_int32((zero_OG - 1).t(), bits),  # from 1 up: see the refusal above
        f"{name}.scales": coded.scale.half().t().contiguous(),
        f"{name}.g_idx": g_idx_I.clone(),
    }


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    return dequantize(read(name, tensors, scheme))


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The coded weight of its checkpoint tensors."""
    bits, args = scheme.weights.num_bits, scheme.weights
    scale_OG = tensors[f"{name}.scales"].float().t().contiguous()
    g_idx_I = tensors[f"{name}.g_idx"]
    q_OI = unpack_int32(tensors[f"{name}.qweight"].t(), bits, len(g_idx_I))
    less_OG = unpack_int32(tensors[f"{name}.qzeros"], bits, len(scale_OG)).t()
    if not args.symmetric and bool((less_OG == args.qmax).any()):
        raise CompressError("a zero point lies beyond the codes", where=f"{name}.qzeros")
    if len(g_idx_I) % args.span(len(g_idx_I)):
        raise CompressError(f"group_size {args.group_size} does not divide {len(g_idx_I)} columns", where=name)
    zero_OG = less_OG + 1
    in_order = torch.equal(g_idx_I, torch.arange(len(g_idx_I)) // args.span(len(g_idx_I)))
    return QuantizedWeight(
        q_OI, scale_OG, None if args.symmetric else zero_OG.contiguous(), g_idx_I=None if in_order else g_idx_I
    )


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> dict[str, Any]:
    """config.json's `quantization_config`; unquantized layers are GPTQModel's `dynamic` exclusions."""
    assert kv_cache is None
    (scheme,) = dict.fromkeys(schemes.values())
    args = scheme.weights
    return {
        "quant_method": "gptq",
        "bits": args.num_bits,
        "group_size": args.group_size or -1,
        "sym": args.symmetric,
        "desc_act": args.actorder == "group",
        "checkpoint_format": "gptq",
        "lm_head": False,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in sorted(ignore) if "." in name},
    }


def files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """quantize_config.json, where auto-gptq looks; its own keys beside ours."""
    shared = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "quant_method")
    own = {"static_groups": False, "true_sequential": True}
    name = {"model_name_or_path": None, "model_file_base_name": "model"}
    return {"quantize_config.json": {key: settings[key] for key in shared} | own | name}


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name, as a loader reads them off config.json.

    Raises:
        CompressError: a version or a mixture that is not read.
    """
    if settings.get("checkpoint_format", "gptq") != "gptq" or settings.get("is_marlin_format"):
        layout = settings.get("checkpoint_format") or "marlin"
        raise CompressError(f"checkpoint_format {layout!r} is not read", where="config.json")
    if settings.get("lm_head"):
        raise CompressError("a quantized head is not read", where="config.json")
    scheme = integer_scheme(
        settings, symmetric=bool(settings.get("sym", True)), actorder=bool(settings.get("desc_act"))
    )
    return {name: scheme for name in linears if not _excluded(name, settings)}


def _excluded(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a linear layer is left unquantized."""
    rules = settings.get("dynamic") or {}
    if any(not rule.startswith("-:") for rule in rules):
        raise CompressError("layers of different widths in one gptq checkpoint are not read", where="config.json")
    inside = [part for parts in settings.get("modules_in_block_to_quantize") or [] for part in parts]
    if inside and not any(name.endswith(f".{part}") for part in inside):
        return True
    return "." not in name or any(re.match(rule[2:], name) for rule in rules)


def unread(scheme: Scheme) -> tuple[str, ...]:
    """Of this format the kernels of vLLM and SGLang read no zero points; vLLM 0.32 no groups in sorted order either."""
    if not scheme.weights.symmetric:
        return "vLLM", "SGLang"
    return ("vLLM",) if scheme.weights.actorder == "group" else ()


GPTQ = Format(
    name="gptq",
    loaders=("transformers with optimum and gptqmodel", "vLLM", "SGLang", "TGI", "ExLlama", "auto-gptq"),
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
    files=files,
    parts=("qweight", "qzeros", "scales", "g_idx"),
    transposed=True,
    unread=unread,
)
