"""The header of a GGUF file: facts and where tensors lie, without the words.

The library's reader makes an object of every token, merge and score: half a gigabyte and many seconds for a large
vocabulary, in every process that opens a model. This one skips arrays and keeps numbers and texts.

Left out: big-endian files, versions before 2, files in parts.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from compress.errors import CompressError

FILE = "model.gguf"  # in an artifact's folder
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 32  # bytes of a text or items of an array: beyond that a file is damaged


@dataclass(frozen=True)
class Placed:
    """A tensor: its type's number, its shape (outermost first) and where its bytes begin in the file."""

    kind: int
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Placed]]:
    """Facts by key, arrays left out, and tensors by name.

    Raises:
        CompressError: it is no GGUF file, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except (struct.error, ValueError, KeyError, ArithmeticError, MemoryError) as error:
        raise CompressError(f"this is no whole GGUF file: {error}", where=str(path), hint="make it again") from error


def _read(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Placed]]:
    if file.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, tensors, facts = _take(file, "I")[0], *_take(file, "QQ")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}")
    found: dict[str, Any] = {}
    for _ in range(facts):
        key, kind = _text(file), _take(file, "I")[0]
        if kind == _ARRAY:
            _skip(file)
        else:
            found[key] = _text(file) if kind == _TEXT else _take(file, _NUMBERS[kind])[0]
    placed = {}
    for _ in range(tensors):
        name, (dimensions,) = _text(file), _take(file, "I")
        if dimensions > 4:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        shape = _take(file, "Q" * dimensions)[::-1]
        placed[name] = Placed(_take(file, "I")[0], shape, _take(file, "Q")[0])
    alignment = int(found.get("general.alignment", _ALIGNMENT))
    begin = -(-file.tell() // alignment) * alignment
    return found, {name: Placed(t.kind, t.shape, begin + t.start) for name, t in placed.items()}


def _take(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    size = struct.calcsize(f"<{layout}")
    return struct.unpack(f"<{layout}", file.read(size))


def _length(file: BinaryIO) -> int:
    (length,) = _take(file, "Q")
    if length > _MOST:
        raise ValueError("a length in its header makes no sense")
    return int(length)


def _text(file: BinaryIO) -> str:
    length = _length(file)
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within its header")
    return text.decode("utf-8")


def _skip(file: BinaryIO) -> None:
    """An array: numbers at once, texts one by one, for each tells its own length."""
    (kind,), count = _take(file, "I"), _length(file)
    if kind != _TEXT:
        file.seek(count * struct.calcsize(f"<{_NUMBERS[kind]}"), 1)
        return
    for _ in range(count):
        file.seek(_length(file), 1)
