"""GGUF files of any tool as ordinary weights: every type that llama.cpp's Python library decodes, by modules' names.

The format `gguf` reads what this toolkit wrote, whose codes it knows. Other tools mix types as they like (Q4_K_M is
Q4_K with some Q6_K) and code embedding and head too; of those only the values are asked for here. A file does not name
the model that it was made from, so its facts and shapes are held to those of the model that it is said to be of.

Left out: files in parts, vocabularies of another size than the model's, the words in the file (the model's are used).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats import gguf_facts, gguf_file
from compress.formats.gguf_file import Found
from compress.formats.gguf_header import Placed, read_header

_ROWS = 1 << 22  # values that are decoded at a time
_NOT_COMPARED = ("general.architecture", "context_length")  # a file's context may be cut
_CLOSE = 1e-5  # numbers in a file are float32
_OTHER = "name the model that the file was made from"


def weights(path: Path) -> dict[str, tuple[str, Found]]:
    """The tensors of a file by the names of a model's: what `gguf_file` calls them, and what they are.

    Raises:
        CompressError: it is no whole GGUF file of an architecture that is read here.
    """
    return {
        f"{name.rpartition('.')[0]}.weight" if found.coded else name: (name, found)
        for name, found in gguf_file.contents(path).items()
    }


def scheme(path: Path) -> list[str]:
    """The types of a file and how many tensors are of each, most bytes first: "Q4_K (168 tensors)"."""
    sizes: dict[str, list[int]] = {}
    for found in gguf_file.contents(path).values():
        sizes.setdefault(found.kind, []).append(found.size)
    ordered = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    return [f"{kind} ({len(each)} tensor{'s' if len(each) > 1 else ''})" for kind, each in ordered]


def bits(path: Path) -> float | None:
    """Bits of a coded weight with its scales; None where none is coded."""
    coded = [found for found in gguf_file.contents(path).values() if found.coded]
    return 8 * sum(found.size for found in coded) / sum(math.prod(f.shape) for f in coded) if coded else None


def check(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], head: str | None) -> None:
    """Holds a file's header to the model that it is to be of, and to what is decoded here.

    Args:
        config: the model's, as transformers understands it.
        shapes: of all its tensors, by name.
        head: the tensor that may be missing, since the embedding stands for it; None where all must be there.

    Raises:
        CompressError: no whole GGUF file; one of another model; a tensor missing, unknown, of another shape, or of a
            type that is not decoded; a model that llama.cpp computes otherwise than transformers.
    """
    if config["model_type"] not in gguf_facts.ARCHITECTURES:
        known = ", ".join(gguf_facts.ARCHITECTURES)
        raise CompressError(
            f"GGUF files are measured for models of the families {known}, and the base is {config['model_type']!r}",
            where=str(path), hint=_OTHER,
        )  # fmt: skip
    if why := gguf_facts.refusal(config):
        hint = "measure the checkpoint that the file was made from"
        raise CompressError(f"llama.cpp does not compute what transformers does: {why}", where=str(path), hint=hint)
    said, placed = read_header(path)
    if int(said.get("split.count") or 1) > 1:
        hint = "join them first: llama-gguf-split --merge FIRST_PART JOINED"
        raise CompressError(f"the file is one of {said['split.count']} parts", where=str(path), hint=hint)
    wrong = [*_other_facts(said, config), *_other_factors(path, placed, config)]
    if not wrong:
        wrong = _other_tensors(weights(path), shapes, head)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CompressError(f"the file is not of this base: {'; '.join(wrong[:3])}{more}", where=str(path), hint=_OTHER)
    for kind in sorted({found.kind for _, found in weights(path).values() if found.coded}):
        _check_type(kind, path)


def _other_facts(said: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What a file says otherwise than it would of a model."""
    wanted = gguf_facts.described(config)
    architecture = wanted["general.architecture"]
    if said.get("general.architecture") != architecture:
        return [f"its architecture is {said.get('general.architecture')!r}, the base's {architecture!r}"]
    found, wanted = (gguf_facts.understood(facts, architecture) for facts in (said, wanted))
    return [
        f"its {key} is {found[key]}, the base's {value}"
        for key, value in wanted.items()
        if not key.endswith(_NOT_COMPARED) and key in found and not _same(found[key], value)
    ]


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=_CLOSE) if numbers else one == other


def _other_factors(path: Path, placed: Mapping[str, Placed], config: Mapping[str, Any]) -> list[str]:
    """Whether the factors of rotary frequencies are another model's."""
    wanted_F, entry = gguf_facts.frequency_factors(config), placed.get(gguf_file.FACTORS)
    if wanted_F is None:
        return [] if entry is None else [f"it has {gguf_file.FACTORS}"]
    if entry is None:
        return [f"it has no {gguf_file.FACTORS}"]
    if entry.kind != 0 or entry.shape != tuple(wanted_F.shape):
        return [f"{gguf_file.FACTORS} has another shape or type"]
    found_F = gguf_file.numbers(path, entry.start, len(wanted_F))
    return [] if torch.allclose(found_F, wanted_F, rtol=1e-3) else [f"{gguf_file.FACTORS} has other values"]


def _other_tensors(
    found: Mapping[str, tuple[str, Found]], shapes: Mapping[str, tuple[int, ...]], head: str | None
) -> list[str]:
    odd = sorted((set(found) ^ set(shapes)) - ({head} - set(found)))
    wrong = [f"{name} is {'missing' if name in shapes else 'unknown'}" for name in odd]
    for name in sorted(set(found) & set(shapes)):
        shape = found[name][1].shape
        if shape != shapes[name]:
            wrong.append(f"{name} is {list(shape)}, in the base {list(shapes[name])}")
    return wrong


def _check_type(kind: str, path: Path) -> None:
    """Refuses a type that the library does not decode, by decoding a block of zeros."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError as error:
        hint = "update the package gguf, or make the file with another type"
        raise CompressError(f"tensors of the type {kind} are not decoded", where=str(path), hint=hint) from error


def dtype(found: Found) -> str:
    """safetensors' name of the narrowest dtype that holds a tensor's values as they are."""
    return "F32" if found.coded or found.plus_one else found.kind


def decode(path: Path, name: str) -> Iterator[Tensor]:
    """A tensor by its name in `gguf_file.contents`, some rows at a time, in the dtype that `dtype` tells.

    Raises:
        CompressError: it holds values that are not finite, as a damaged file may.
    """
    found, value = gguf_file.contents(path)[name], gguf_file.read(path, name)
    for rows in torch.split(value, max(1, _ROWS * len(value) // math.prod(found.shape))):
        values = _decoded(rows, found.kind) if found.coded else rows
        if not bool(torch.isfinite(values).all()):
            what = f"the tensor {name} holds values that are not finite"
            raise CompressError(what, where=str(path), hint="copy or make the file again")
        yield values


def _decoded(rows: Tensor, kind: str) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    with np.errstate(all="ignore"):  # what is not finite is looked for afterwards
        return torch.from_numpy(dequantize(rows.contiguous().numpy(), GGMLQuantizationType[kind]))
