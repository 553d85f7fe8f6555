"""Joins safetensors files into the checkpoint's, tensor by tensor, without holding any of them.

A safetensors file is an 8-byte little-endian header length, a JSON header (name to dtype, shape and offsets),
and the bytes. Joining needs only the headers and copies of byte ranges; the library's own writer would need
every tensor in memory.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compress.files import replace, sync

SHARD_BYTES = 5 << 30
_COPY_BYTES = 8 << 20
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its header entry and the bytes [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that is made when it is written: its header entry, and its rows, some at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        return _WIDTHS[self.dtype] * math.prod(self.shape)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """What a safetensors file holds, in the order of its bytes."""
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    begin = 8 + length
    found = [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, *(begin + o for o in entry["data_offsets"]))
        for name, entry in header.items()
    ]
    return sorted(found, key=lambda t: t.start)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A new safetensors file.

    Raises:
        OSError: the disk does not take it; the library says so only in words.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def write_checkpoint(folder: Path, tensors: Sequence[StoredTensor], limit: int = SHARD_BYTES) -> list[Path]:
    """Writes model.safetensors, or shards of at most `limit` bytes and their index.

    Every file is written under another name, forced to the disk and renamed; the index comes last.
    """
    shards = _split(tensors, limit)
    if len(shards) == 1:
        path = folder / "model.safetensors"
        _write(path, shards[0])
        return [path]
    paths = [folder / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        _write(path, shard)
    index = {
        "metadata": {"total_size": sum(t.end - t.start for t in tensors)},
        "weight_map": {t.name: p.name for p, shard in zip(paths, shards, strict=True) for t in shard},
    }
    replace(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    return paths


def _split(tensors: Iterable[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        length = tensor.end - tensor.start
        if shards[-1] and size + length > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += length
    return shards


def _write(path: Path, tensors: Sequence[StoredTensor]) -> None:
    def copy(out: Any) -> None:
        for tensor in tensors:
            with open(tensor.file, "rb", buffering=0) as source:
                _copy(source.fileno(), out, tensor.start, tensor.end)

    _write_file(path, [(t.name, t.dtype, t.shape, t.end - t.start) for t in tensors], copy)


def write_made(path: Path, tensors: Sequence[MadeTensor]) -> None:
    """A new safetensors file of tensors that are made one after the other, some rows at a time."""

    def make(out: Any) -> None:
        for tensor in tensors:
            before = out.tell()
            for rows in tensor.make():
                out.write(rows.contiguous().view(-1).view(torch.uint8).numpy())
            assert out.tell() - before == tensor.bytes, f"{tensor.name}: other values than its shape says"

    _write_file(path, [(t.name, t.dtype, t.shape, t.bytes) for t in tensors], make)


def _write_file(
    path: Path, entries: Sequence[tuple[str, str, tuple[int, ...], int]], fill: Callable[[Any], None]
) -> None:
    """A file, under another name until it is on the disk; its header from entries (name, dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        fill(out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def _copy(source: int, out: Any, start: int, end: int) -> None:
    while start < end:
        data = os.pread(source, min(_COPY_BYTES, end - start), start)
        assert data, "a tensor's file ends before its header says"
        out.write(data)
        start += len(data)
