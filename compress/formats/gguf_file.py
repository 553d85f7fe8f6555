"""GGUF files: a model's tensors and all that is said of it, in one file, written and read tensor by tensor.

Names here are those of transformers' modules; the file's are llama.cpp's (`blk.0.attn_q.weight`), translated by the
library's own table. A coded weight is named by its type (`model.layers.0.self_attn.q_proj.Q4_0`, uint8 [O, bytes of a
row]), everything else `…weight` or `…bias` as usual. Rows that the file keeps in another order, and norms that it keeps
with one added, are put right on the way in and out.

Written with llama.cpp's library, read without it (see `gguf_header`); nothing is mapped, since pages count as memory.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import CompressError
from compress.files import sync
from compress.formats import gguf_facts, gguf_words
from compress.formats.gguf_header import FILE, Placed, read_header
from compress.shards import StoredTensor

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
_FLOATS = ("BF16", "F16", "F32")
FACTORS = "rope_freqs.weight"
_ENDS = ("model.embed_tokens", "model.norm", "lm_head")
_LAYERS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: where its bytes come from, and its type and shape in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        width = {"F32": 4, "F16": 2, "BF16": 2}.get(self.kind, 1)
        return width * math.prod(self.shape)


@dataclass(frozen=True)
class Found:
    """A tensor in a file: its type, shape and bytes there, and what was done to it.

    Attributes:
        kind: llama.cpp's name of the type.
        shape: of the values; outermost first.
        stored: as `read` gives it: the same, but of a coded tensor [..., bytes of a row].
        start, size: its bytes in the file.
        heads: of a layer whose rows stand in another order, by its heads; else None.
        plus_one: whether one was added.
    """

    kind: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    start: int
    size: int
    heads: int | None
    plus_one: bool

    @property
    def coded(self) -> bool:
        """Whether it is a string of blocks, not of numbers."""
        return self.kind not in _FLOATS


def write(folder: Path, tensors: Sequence[StoredTensor], config: Mapping[str, Any], words: Path, name: str) -> None:
    """Writes `folder`/model.gguf.

    Args:
        folder: the artifact.
        tensors: of the whole model, by their modules' names.
        config: the base model's config, as transformers understands it.
        words: the folder with the tokenizer's files.
        name: the model's, for people.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, LlamaFileType, get_tensor_name_map

    logging.getLogger("gguf").setLevel(logging.ERROR)
    architecture = gguf_facts.ARCHITECTURES[config["model_type"]]
    number = next(n for n, said in MODEL_ARCH_NAMES.items() if said == architecture)
    spelled = get_tensor_name_map(number, int(config["num_hidden_layers"]))
    entries = [_entry(tensor, config, spelled) for tensor in tensors]
    factors = gguf_facts.frequency_factors(config)
    if factors is not None:
        entries.append(_Entry(FACTORS, "F32", tuple(factors.shape), lambda: factors))
    kinds = [entry.kind for entry in entries if entry.kind.startswith("Q")]
    path = folder / f"{FILE}.tmp"
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_quantization_version(2)
    writer.add_file_type(_file_type(max(dict.fromkeys(kinds), key=kinds.count), LlamaFileType))
    gguf_facts.describe(writer, config)
    gguf_words.describe(writer, words, int(config["vocab_size"]))
    for entry in entries:
        shape = list(entry.shape)
        raw = np.dtype("uint8" if entry.kind.startswith("Q") else "float32")
        writer.add_tensor_info(entry.name, shape, raw, entry.bytes, GGMLQuantizationType[entry.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(entry.make().contiguous().view(torch.uint8).numpy())
    writer.close()
    sync(path)
    path.rename(folder / FILE)
    sync(folder)


def _file_type(kind: str, known: Any) -> Any:
    """llama.cpp's word for a file most of whose weights are of a type."""
    for name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_S"):
        if name in known.__members__:
            return known[name]
    raise AssertionError(f"no file type for {kind}")


def _entry(tensor: StoredTensor, config: Mapping[str, Any], spelled: Any) -> _Entry:
    """A tensor of the model as the file will have it."""
    module, part = tensor.name.rsplit(".", 1)
    name = spelled.get_name(module)
    assert name is not None, f"{tensor.name}: check the family first"
    coded, heads = tensor.dtype == "U8", gguf_facts.heads_of(module, config)
    small = len(tensor.shape) == 1
    kind = part if coded else "F32" if small else tensor.dtype

    def make() -> Tensor:
        value = _bytes_of(tensor.file, tensor.start, tensor.end).view(_DTYPES[tensor.dtype]).view(tensor.shape)
        if not coded and small:
            value = value.float()
        if gguf_facts.adds_one(module, config):
            value = value + 1
        return value if heads is None else value[gguf_facts.rotated(heads, len(value))]

    return _Entry(f"{name}.{'bias' if part == 'bias' else 'weight'}", kind, tensor.shape, make)


def _bytes_of(file: Path, start: int, end: int) -> Tensor:
    with open(file, "rb", buffering=0) as handle:
        handle.seek(start)
        value = bytearray(end - start)
        view, done = memoryview(value), 0
        while done < len(value):
            count = handle.readinto(view[done:])
            if not count:
                raise CompressError("the file ends before its tensors do", where=str(file))
            done += count
    return torch.frombuffer(value, dtype=torch.uint8)


def numbers(path: Path, start: int, count: int) -> Tensor:
    """Float32 numbers at a place in a file, [count]."""
    return _bytes_of(path, start, start + 4 * count).view(torch.float32)


def contents(path: Path) -> Mapping[str, Found]:
    """The tensors of a file by their modules' names.

    Raises:
        CompressError: it is no whole GGUF file, or one of an architecture that is not read here.
    """
    stat = path.stat()
    return _contents(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _contents(path: Path, size: int, changed: int) -> Mapping[str, Found]:
    del changed
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    said, placed = read_header(path)
    architecture = said.get("general.architecture")
    if architecture not in gguf_facts.ARCHITECTURES.values():
        raise CompressError(f"GGUF files of the architecture {architecture!r} are not read", where=str(path))
    blocks, heads = (_count(said, f"{architecture}.{key}", path) for key in ("block_count", "attention.head_count"))
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == architecture)
    spelled = get_tensor_name_map(number, min(blocks, len(placed)))
    modules = [*_ENDS, *(f"model.layers.{i}.{layer}" for i in range(min(blocks, len(placed))) for layer in _LAYERS)]
    names = {name: module for module in modules if (name := spelled.get_name(module))}
    facts = {
        "model_type": next(k for k, name in gguf_facts.ARCHITECTURES.items() if name == architecture),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get(f"{architecture}.attention.head_count_kv", heads),
    }
    found: dict[str, Found] = {}
    for name, tensor in placed.items():
        stem, _, part = name.rpartition(".")
        if name == FACTORS:
            continue
        if stem not in names:
            raise CompressError(f"a tensor {name} is not known of {architecture}", where=str(path))
        entry = _found(name, tensor, names[stem], facts, path)
        if entry.start + entry.size > size:
            raise CompressError("the file ends before its tensors do", where=str(path), hint="make it again")
        found[f"{names[stem]}.{entry.kind if entry.coded else part}"] = entry
    return found


def _count(said: Mapping[str, Any], key: str, path: Path) -> int:
    value = said.get(key)
    if not isinstance(value, int) or value < 1:
        raise CompressError(f"the file does not say {key}", where=str(path), hint="make it again")
    return value


def _found(name: str, tensor: Placed, module: str, facts: Mapping[str, Any], path: Path) -> Found:
    """What the header says of a tensor.

    Raises:
        CompressError: a type that is not known, or a row that is no whole number of its blocks.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.kind not in set(GGMLQuantizationType):
        raise CompressError(
            f"the tensor {name} is of a type that is not known, number {tensor.kind}", where=str(path),
            hint="update the package gguf, or make the file with another type",
        )  # fmt: skip
    number = GGMLQuantizationType(tensor.kind)
    columns, width = GGML_QUANT_SIZES[number]
    if not tensor.shape or tensor.shape[-1] % columns:
        raise CompressError(
            f"the tensor {name} of shape {list(tensor.shape)} is no string of whole {number.name} blocks",
            where=str(path), hint="make the file again",
        )  # fmt: skip
    coded = number.name not in _FLOATS
    stored = (*tensor.shape[:-1], tensor.shape[-1] // columns * width) if coded else tensor.shape
    length = math.prod(tensor.shape) // columns * width
    heads, one = gguf_facts.heads_of(module, facts), gguf_facts.adds_one(module, facts)
    return Found(number.name, tensor.shape, stored, tensor.start, length, heads, one)


def read(path: Path, name: str) -> Tensor:
    """A tensor by its module's name, in the order of rows and with the values that transformers has."""
    entry = contents(path)[name]
    dtype = _DTYPES["U8" if entry.coded else entry.kind]
    value = _bytes_of(path, entry.start, entry.start + entry.size).view(dtype).view(entry.stored)
    if entry.heads is not None:
        value = value[gguf_facts.rotated(entry.heads, len(value)).argsort()]
    return value.float() - 1 if entry.plus_one else value
