"""llama.cpp's GGUF: the artifact's weights in one file, in the blocks that llama.cpp and Ollama compute from.

A row is a string of blocks: 32 columns with one float16 scale d (and an offset m), or for the K-quants 256 columns with
small integers that say each group's scale and least value in steps of the block. With q the unsigned code:

| type | columns | value |
|---|---|---|
| Q4_0, Q5_0 | 32 | d (q − 2^(b−1)) |
| Q4_1, Q5_1 | 32 | d q + m |
| Q8_0 | 32 | d q, q signed |
| Q2_K, Q4_K, Q5_K | 256, in groups of 16, 32, 32 | (d s) q − (dmin l) |
| Q3_K, Q6_K | 256, in groups of 16 | (d s) (q − 2^(b−1)) |

Solved codes are carried over as they are. A group of 64 or 128, or a channel, repeats its scale in every block. A group
of a multiple of 256 columns becomes a K-quant whose groups all have the scale d and the zero point l: exactly, which
Q4_1 is not, since d · zero is rounded to float16 there. Codes of fewer bits lie in the next wider block that there is.

A coded weight is one tensor, `<layer>.<type>`, uint8 [O, bytes of a row]; `gguf_file` turns it into the file's. What is
not coded keeps its dtype (F32, F16, BF16), norms and biases are F32.

Left out: IQ and ternary types, MXFP4, tables of importance (imatrix: GPTQ has better), experts.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from compress.errors import CompressError
from compress.formats import gguf_bits, gguf_facts, gguf_file, gguf_words
from compress.formats.base import DECODED, Format, with_half_scales
from compress.formats.gguf_header import FILE
from compress.numerics import QuantizedWeight
from compress.schemes import K_QUANTS, SUPER, QuantArgs, Scheme

BLOCK = 32
# Bytes of a block, and its columns.
BLOCKS = {
    "Q4_0": (18, 32), "Q4_1": (20, 32), "Q5_0": (22, 32), "Q5_1": (24, 32), "Q8_0": (34, 32),
    "Q2_K": (84, 256), "Q3_K": (110, 256), "Q4_K": (144, 256), "Q5_K": (176, 256), "Q6_K": (210, 256),
}  # fmt: skip
_CODE_BITS = {name: int(name[1]) for name in BLOCKS}
_GROUPS = {name: int(scheme.weights.group_size or 0) for name, scheme in K_QUANTS.items()}
_SYMMETRIC = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}  # what is taken from an unsigned code
_FLAT_SYMMETRIC = ((4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0"))
_FLAT_OFFSET = ((4, "Q4_1"), (5, "Q5_1"))
_SUPER_SYMMETRIC = {2: "Q2_K", 3: "Q3_K", 6: "Q6_K"}
_SUPER_OFFSET = {2: "Q2_K", 3: "Q4_K", 4: "Q4_K", 5: "Q5_K"}


def block_type(args: QuantArgs, in_features: int) -> str | None:
    """The type whose blocks hold codes as they are; None when there is none."""
    if args.type != "int" or args.actorder:
        return None
    if args.strategy == "super_group":
        return f"Q{args.num_bits}_K"
    span = args.span(in_features)
    if args.strategy not in ("group", "channel") or span % BLOCK:
        return None
    if span % SUPER == 0:
        whole = (_SUPER_SYMMETRIC if args.symmetric else _SUPER_OFFSET).get(args.num_bits)
        if whole is not None:
            return whole
    flat = _FLAT_SYMMETRIC if args.symmetric else _FLAT_OFFSET
    return next((name for bits, name in flat if args.num_bits <= bits), None)


def can_write(scheme: Scheme, model_type: str = "") -> str | None:
    """None when the format holds the scheme, else the reason."""
    if model_type and model_type not in gguf_facts.ARCHITECTURES:
        return f"it is written for the families {', '.join(gguf_facts.ARCHITECTURES)}"
    if scheme.input_activations is not None:
        return "it has no words for quantized activations"
    args = scheme.weights
    if block_type(args, args.group_size or SUPER) is None:
        return (
            "it holds integers in groups of multiples of 32 or by channel, up to 8 bits, with zero points up to 5, "
            "and K-quants"
        )
    return None


def can_mix(schemes: Collection[Scheme]) -> None:
    """Every tensor says its own type."""
    del schemes


def misfit(shape: tuple[int, int]) -> str | None:
    """Rows are whole blocks."""
    return f"{shape[1]} is no multiple of 32" if shape[1] % BLOCK else None


def caveat(scheme: Scheme, model_type: str = "") -> str:
    """How it is measured here, and what the blocks cost beyond the codes' own bits."""
    del model_type
    args = scheme.weights
    name = block_type(args, args.group_size or SUPER)
    blocks = f"{name} blocks" if name is not None and args.strategy != "channel" else "blocks"
    told = f"llama.cpp computes from the file's {blocks} as they are; {DECODED}"
    if name is None or _CODE_BITS[name] == args.num_bits:
        return told
    return f"{told}; codes of {args.num_bits} bits lie in blocks of {name}, which have room for {_CODE_BITS[name]}"


def weight_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Bytes of a weight [O, I]."""
    size, columns = BLOCKS[block_type(scheme.weights, shape[1]) or "Q8_0"]
    return shape[0] * shape[1] // columns * size


def refuses(config: Mapping[str, Any], folder: Path | None) -> str | None:
    """Why llama.cpp would not compute what this model computes, or not read its tokenizer; None when all is well."""
    if config["model_type"] not in gguf_facts.ARCHITECTURES:
        return None  # `can_write` says so
    return gguf_facts.refusal(config) or (gguf_words.refusal(folder) if folder is not None else None)


def encode(name: str, coded: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Checkpoint tensors of a coded weight: one, uint8 [O, bytes of a row]."""
    args, (out_features, in_features) = scheme.weights, coded.q_OI.shape
    kind = block_type(args, in_features)
    assert kind is not None, "the plan refuses what there is no block for"
    assert coded.g_idx_I is None, "the plan refuses groups in the columns' order"
    if args.strategy != "super_group":
        coded = with_half_scales(name, coded)
    columns = BLOCKS[kind][1]
    # unsigned codes; symmetric blocks of more bits than the codes have put zero in their own middle
    middle = _SYMMETRIC.get(kind, 0 if kind == "Q8_0" else int(-args.qmin))
    code_NC = (coded.q_OI + middle).view(torch.uint8).view(-1, columns)
    pack = _pack_super if columns == SUPER else _pack_flat
    return {f"{name}.{kind}": pack(kind, code_NC, coded, args).view(out_features, -1)}


def _pack_flat(kind: str, code_NC: Tensor, coded: QuantizedWeight, args: QuantArgs) -> Tensor:
    """Blocks of 32 columns, uint8 [N, bytes]."""
    blocks = coded.q_OI.shape[1] // BLOCK

    def each(value_OG: Tensor) -> Tensor:
        return value_OG.repeat_interleave(blocks // value_OG.shape[-1], -1).reshape(-1, 1)

    scale_N1 = each(coded.scale).half()
    parts = [scale_N1.view(torch.uint8)]
    if kind.endswith("_1"):
        zero_N1 = args.qmin - each(coded.zero.float() if coded.zero is not None else torch.zeros_like(coded.scale))
        parts.append((scale_N1.float() * zero_N1).half().view(torch.uint8))
    if kind[1] == "5":
        parts.append(gguf_bits.planes(code_NC >> 4, 8, transposed=True))
    parts.append(code_NC if kind == "Q8_0" else gguf_bits.halves(code_NC & 15, BLOCK // 2))
    return torch.cat(parts, 1)


def _pack_super(kind: str, code_NC: Tensor, coded: QuantizedWeight, args: QuantArgs) -> Tensor:
    """Blocks of 256 columns, uint8 [N, bytes]."""
    d_N1, low_N1, count_NG, least_NG = _steps(kind, coded, args)
    scale, low = d_N1.half().view(torch.uint8), low_N1.half().view(torch.uint8)
    if kind == "Q2_K":
        return torch.cat([count_NG | least_NG << 4, gguf_bits.quarters(code_NC), scale, low], 1)
    if kind == "Q3_K":
        return torch.cat(
            [
                gguf_bits.planes(code_NC >> 2, 8),
                gguf_bits.quarters(code_NC & 3),
                gguf_bits.scales_of_3(count_NG + 32),
                scale,
            ],
            1,
        )
    if kind == "Q6_K":
        return torch.cat([gguf_bits.halves(code_NC & 15, 64), gguf_bits.quarters(code_NC >> 4), count_NG, scale], 1)
    parts = [scale, low, gguf_bits.scales_of_4(count_NG, least_NG)]
    if kind == "Q5_K":
        parts.append(gguf_bits.planes(code_NC >> 4, 8))
    return torch.cat([*parts, gguf_bits.halves(code_NC & 15, 32)], 1)


def _steps(kind: str, coded: QuantizedWeight, args: QuantArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every block its steps [N, 1] of scales and least values, and of each group how many of them, uint8 [N, G]."""
    groups = SUPER // _GROUPS[kind]
    if args.strategy == "super_group":
        assert coded.global_scale is not None
        step_N2 = coded.global_scale.reshape(-1, 2)
        scale_NG = coded.scale.reshape(-1, groups)
        count_NG = (scale_NG / step_N2[:, :1]).round()
        least_NG = torch.zeros_like(count_NG)
        if coded.zero is not None:
            least_NG = ((coded.zero.reshape(-1, groups) - args.qmin) * scale_NG / step_N2[:, 1:]).round()
        return step_N2[:, :1], step_N2[:, 1:], count_NG.to(torch.uint8), least_NG.to(torch.uint8)
    blocks = coded.q_OI.shape[1] // SUPER
    times = blocks // coded.scale.shape[-1]
    d_N1 = coded.scale.repeat_interleave(times, -1).reshape(-1, 1)
    zero_OG = torch.zeros_like(coded.scale) if coded.zero is None else coded.zero.float()
    least_N1 = (zero_OG - args.qmin).repeat_interleave(times, -1).reshape(-1, 1)
    ones_NG = torch.ones(len(d_N1), groups, dtype=torch.uint8)
    return d_N1, d_N1, ones_NG, least_N1.to(torch.uint8).expand(-1, groups)


def decode(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """float32 [O, I] weight of its checkpoint tensors."""
    del scheme
    kind, stored_OB = _stored(name, tensors)
    code_NGi, scale_NG1, least_NG1 = _unpack(kind, stored_OB)
    value = code_NGi.float() * scale_NG1
    return (value if least_NG1 is None else value.sub_(least_NG1)).view(len(stored_OB), -1)


def read(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """The coded weight of its checkpoint tensors.

    Raises:
        CompressError: its blocks are not those of the scheme (another type, or scales that differ within a group).
    """
    args = scheme.weights
    kind, stored_OB = _stored(name, tensors)
    code_NGi, scale_NG1, least_NG1 = _unpack(kind, stored_OB)
    rows = len(stored_OB)
    in_features = code_NGi.numel() // rows
    if kind != block_type(args, in_features):
        raise CompressError(f"it is of type {kind}, and config.json says {scheme.text}", where=name)
    signed = kind in _SYMMETRIC or kind == "Q8_0"
    q_OI = (code_NGi if signed else code_NGi + int(args.qmin)).to(torch.int8).view(rows, -1)
    scale_OG, least_OG = (None if part is None else part.reshape(rows, -1) for part in (scale_NG1, least_NG1))
    assert scale_OG is not None
    zero_OG = None if least_OG is None else least_OG / scale_OG + args.qmin
    if args.strategy == "super_group":
        steps = _super_parts(kind, stored_OB.view(-1, BLOCKS[kind][0]))[1].view(rows, -1, 2)
        return QuantizedWeight(q_OI, scale_OG, None if args.symmetric else zero_OG, global_scale=steps)
    groups = in_features // args.span(in_features)
    scale_OG, zero_OG = (None if part is None else _one_of_each(name, part, groups) for part in (scale_OG, zero_OG))
    assert scale_OG is not None
    return QuantizedWeight(
        q_OI, scale_OG, None if args.symmetric or zero_OG is None else zero_OG.round().to(torch.int8)
    )


def _one_of_each(name: str, part_OB: Tensor, groups: int) -> Tensor:
    """What the blocks of each group have in common."""
    part_OGb = part_OB.view(len(part_OB), groups, -1)
    if not bool((part_OGb == part_OGb[..., :1]).all()):
        raise CompressError("blocks of one group differ in their scales", where=name)
    return part_OGb[..., 0].contiguous()


def _stored(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    kind = next(kind for kind in BLOCKS if f"{name}.{kind}" in tensors)
    return kind, tensors[f"{name}.{kind}"]


def _unpack(kind: str, stored_OB: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [N, G, i] (signed where the type has a middle), scales [N, G, 1] and what is taken from their products."""
    block_NB = stored_OB.reshape(-1, BLOCKS[kind][0])
    if BLOCKS[kind][1] == SUPER:
        code_NC, step_N2, count_NG, least_NG = _super_parts(kind, block_NB)
        code_NGi = code_NC.view(len(code_NC), -1, _GROUPS[kind])
        scale_NG1 = (step_N2[:, :1] * count_NG).unsqueeze(-1)
        if kind in _SYMMETRIC:
            return code_NGi.to(torch.int16) - _SYMMETRIC[kind], scale_NG1, None
        return code_NGi, scale_NG1, (step_N2[:, 1:] * least_NG).unsqueeze(-1)
    d_N1, rest = gguf_bits.number(block_NB)
    offset_N1 = None
    if kind.endswith("_1"):
        offset_N1, rest = gguf_bits.number(rest)
    if kind == "Q8_0":
        return rest.view(torch.int8).unsqueeze(1), d_N1.unsqueeze(-1), None
    high, rest = (rest[:, :4], rest[:, 4:]) if kind[1] == "5" else (None, rest)
    code_NC = gguf_bits.unhalve(rest, BLOCK // 2)
    if high is not None:
        code_NC = code_NC | gguf_bits.unplane(high, 8, transposed=True) << 4
    if offset_N1 is None:
        return (code_NC.to(torch.int16) - _SYMMETRIC[kind]).unsqueeze(1), d_N1.unsqueeze(-1), None
    return code_NC.unsqueeze(1), d_N1.unsqueeze(-1), -offset_N1.unsqueeze(-1)


def _super_parts(kind: str, block_NB: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of blocks of 256 columns: unsigned codes [N, 256], steps float32 [N, 2], and how many of them [N, G] each."""
    if kind == "Q2_K":
        both, quarters, d, low = torch.split(block_NB, [16, 64, 2, 2], 1)
        return gguf_bits.unquarter(quarters), gguf_bits.numbers(d, low), both & 15, both >> 4
    if kind == "Q3_K":
        high, quarters, packed, d = torch.split(block_NB, [32, 64, 12, 2], 1)
        code_NC = gguf_bits.unquarter(quarters) | gguf_bits.unplane(high, 8) << 2
        count_NG = gguf_bits.unscale_of_3(packed).to(torch.int16) - 32
        return code_NC, gguf_bits.numbers(d, d), count_NG, torch.zeros_like(count_NG)
    if kind == "Q6_K":
        low_bits, high_bits, counts, d = torch.split(block_NB, [128, 64, 16, 2], 1)
        code_NC = gguf_bits.unhalve(low_bits, 64) | gguf_bits.unquarter(high_bits) << 4
        count_NG = counts.contiguous().view(torch.int8)
        return code_NC, gguf_bits.numbers(d, d), count_NG, torch.zeros_like(count_NG)
    d, low, packed, *planes, halves = torch.split(
        block_NB, [2, 2, 12, 32, 128] if kind == "Q5_K" else [2, 2, 12, 128], 1
    )
    code_NC = gguf_bits.unhalve(halves, 32)
    if planes:
        code_NC = code_NC | gguf_bits.unplane(planes[0], 8) << 4
    return code_NC, gguf_bits.numbers(d, low), *gguf_bits.unscale_of_4(packed)


def config(schemes: Mapping[str, Scheme], ignore: list[str], kv_cache: QuantArgs | None = None) -> dict[str, Any]:
    """config.json's `quantization_config`, for this toolkit: what reads the file needs nothing beside it."""
    del ignore
    assert kv_cache is None
    kinds = list(dict.fromkeys(schemes.values()))
    groups = [
        {
            "weights": kind.weights.model_dump(mode="json", exclude_none=True),
            "layers": sorted(name for name, scheme in schemes.items() if scheme == kind),
        }
        for kind in kinds
    ]
    return {"quant_method": "gguf", "file": FILE, "groups": groups}


def read_config(settings: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
    """Schemes by module name.

    Raises:
        CompressError: a folder that this toolkit did not write.
    """
    try:
        return {
            name: scheme
            for group in settings["groups"]
            for scheme in [Scheme(weights=group["weights"])]
            for name in group["layers"]
            if name in linears
        }
    except (KeyError, TypeError, ValidationError) as error:
        raise CompressError("this description of a GGUF file is not read", where="config.json") from error


GGUF = Format(
    name="gguf",
    loaders=("llama.cpp", "Ollama"),
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
    parts=tuple(BLOCKS),
    refuses=refuses,
    close=gguf_file.write,
)
