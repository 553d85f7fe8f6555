"""Documents from a user's own file: .jsonl, .parquet, or a text file that is one document.

A .jsonl or .parquet file has a `text` or a `messages` column (conversations) and is read in a seeded order.
A file that is not what it seems is refused with its line or row, never skipped over.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CompressError

WHERE = "calibration.dataset"
_COLUMNS = ("text", "messages")


@dataclass(frozen=True)
class Document:
    """One piece of a source. Documents of one group repeat each other and stay on one side."""

    content: str | list[dict[str, Any]]  # text, or the messages of a conversation
    group: str
    where: str


def shuffled(count: int, seed: int) -> list[int]:
    """0 … count - 1 in the order of the seed."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def column_of(names: Iterable[str], where: str, wanted: tuple[str, ...] = _COLUMNS) -> str:
    """The first of the wanted columns that is there.

    Raises:
        CompressError: none is.
    """
    there = list(names)
    for name in wanted:
        if name in there:
            return name
    raise CompressError(
        f"no {' and no '.join(f'`{name}`' for name in wanted)}; there are: {', '.join(there) or 'none'}",
        where=where,
        hint="name the column that holds the text `text`, in every line",
    )


def as_document(value: Any, column: str, where: str) -> Document:
    """A column's value as a document; a missing text is a blank one, which is passed over later.

    Raises:
        CompressError: the value is neither a text nor messages.
    """
    if column == "text" and (value is None or isinstance(value, str)):
        return Document(value or "", where, where)
    if column == "messages" and isinstance(value, list) and value and all(map(_is_message, value)):
        # a column of structs gives every message every key: templates ask whether a key is there
        return Document([{k: v for k, v in m.items() if v is not None} for m in value], where, where)
    expected = "a string" if column == "text" else "a list of {role, content}"
    raise CompressError(
        f"`{column}` is not {expected}: {str(value)[:60]!r}", where=where, hint="mend or remove it"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def existing_file(asked: str) -> Path:
    """The absolute path of `file:PATH`, checked to be a file with something in it.

    Raises:
        CompressError: it is not.
    """
    name = asked.removeprefix("file:")
    path = Path(os.path.abspath(Path(name).expanduser()))
    what = None
    if not name or not path.exists():
        what = f"no such file: {name or '(empty path)'}"
    elif not path.is_file():
        what = f"{path} is {'a directory' if path.is_dir() else 'not a regular file'}"
    elif path.stat().st_size == 0:
        what = f"{path} is empty"
    if what:
        raise CompressError(
            what, where=f"dataset: {asked}", hint="give the path of a .txt, .jsonl or .parquet file"
        )
    return path


def file_sha256(path: Path) -> str:
    with _readable(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_text(path: Path) -> bool:
    """Whether the file is one document."""
    return path.suffix.lower() not in {".jsonl", ".parquet"}


def read_text(path: Path) -> str:
    """The whole file, byte for byte but for a byte-order mark.

    Raises:
        CompressError: it can't be read, is not UTF-8, or is blank.
    """
    with _readable(path):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{path}:{line} (byte {error.start})") from error
    if not text.strip():
        raise CompressError(f"{path} is empty", where=WHERE, hint="give a file with text in it")
    return text


def file_documents(path: Path, seed: int) -> Iterator[Document]:
    """The documents of a .jsonl or .parquet file in the seed's order.

    Raises:
        CompressError: the file is damaged, or has no column to read; at the first document.
    """
    parquet = path.suffix.lower() == ".parquet"
    return _parquet_documents(path, seed) if parquet else _jsonl_documents(path, seed)


def _jsonl_documents(path: Path, seed: int) -> Iterator[Document]:
    """One JSON object a line: every line is checked first, then only the drawn ones are read again.

    So the texts are never all in memory.
    """
    column: str | None = None
    lines: list[tuple[str, int]] = []
    with _readable(path), path.open("rb") as file:
        place = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                record = _json_object(line, where)
                column = column_of(record, where, (column,) if column else _COLUMNS)
                as_document(record[column], column, where)
                lines.append((where, place))
            place += len(line)
        for index in shuffled(len(lines), seed):
            assert column
            where, place = lines[index]
            file.seek(place)
            yield as_document(_json_object(file.readline(), where)[column], column, where)


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where} (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise CompressError(
            f"not JSON: {error.msg} at column {error.colno}", where=where, hint="one JSON object a line"
        ) from error
    if not isinstance(record, dict):
        raise CompressError("the line is not a JSON object", where=where, hint='write {"text": "…"}')
    return record


def _parquet_documents(path: Path, seed: int) -> Iterator[Document]:
    """The rows of a parquet file; its text or messages column is held whole."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _readable(path), pyarrow.parquet.ParquetFile(path) as file:
            column = column_of(file.schema_arrow.names, str(path))
            values = file.read(columns=[column]).column(column)
    except pyarrow.ArrowException as error:
        raise CompressError(
            f"not a parquet file: {str(error).splitlines()[0]}", where=str(path), hint="check the file"
        ) from error
    for index in shuffled(len(values), seed):
        yield as_document(values[index].as_py(), column, f"{path}, row {index}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to read `path` into the user's error."""
    try:
        yield
    except OSError as error:
        raise CompressError(
            f"cannot read {path}: {error.strerror or error}",
            where=WHERE,
            hint="check the file's permissions and its disk",
        ) from error


def _not_utf8(where: str) -> CompressError:
    hint = "convert it: iconv -f latin1 -t utf-8 IN > OUT (or whatever its encoding is)"
    return CompressError("the file is not UTF-8", where=where, hint=hint)
