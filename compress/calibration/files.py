"""A user's own file: .jsonl or .parquet with a document a row, or a text file that is one document.

Held whole. A row that is not what it seems is refused with its place, never passed over.
"""

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CompressError

WHERE = "calibration.dataset"
_HINT = "give the path of a readable .txt, .jsonl or .parquet file with something in it"


@dataclass(frozen=True)
class Document:
    """One piece of a source. Documents of one group repeat each other and stay on one side."""

    content: str | list[dict[str, Any]]  # text, or the messages of a conversation
    group: str
    where: str


def read_bytes(path: Path) -> bytes:
    """The whole file, which must be there with something in it."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        why = getattr(error, "strerror", None) or error
        raise CompressError(f"cannot read {path}: {why}", where=WHERE, hint=_HINT) from error
    if not content.strip():
        raise CompressError(f"{path} is empty", where=WHERE, hint=_HINT)
    return content


def file_documents(path: Path, seed: int) -> list[Document]:
    """The documents of a .jsonl or .parquet file in the seed's order; any other file is text, and one."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        documents = [as_document(row, f"{path}, row {i}") for i, row in enumerate(_parquet_rows(path))]
    elif suffix == ".jsonl":
        lines = [(line, f"{path}:{i}") for i, line in enumerate(read_bytes(path).split(b"\n"), start=1)]
        documents = [as_document(_json_row(line, where), where) for line, where in lines if line.strip()]
    else:
        documents = [Document(read_text(path), str(path), str(path))]
    random.Random(seed).shuffle(documents)
    return documents


def as_document(row: dict[str, Any], where: str) -> Document:
    """The row's text, else its messages; a missing text is a blank one, which is passed over later."""
    value = row.get("text", row.get("messages"))
    if "text" in row:
        if value is None or isinstance(value, str):
            return Document(value or "", where, where)
        what = f"`text` is not a string: {str(value)[:60]!r}"
    elif "messages" in row:
        if isinstance(value, list) and value and all(map(_is_message, value)):
            # a column of structs gives every message every key: templates ask whether a key is there
            return Document([{k: v for k, v in m.items() if v is not None} for m in value], where, where)
        what = f"`messages` is not a list of {{role, content}}: {str(value)[:60]!r}"
    else:
        what = f"no `text` and no `messages`; there are: {', '.join(row) or 'none'}"
    raise CompressError(what, where=where, hint="give every row a `text`, or `messages`")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def read_text(path: Path) -> str:
    """The whole file, byte for byte but for a byte-order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "convert it: iconv -f latin1 -t utf-8 IN > OUT (or whatever its encoding is)"
        raise CompressError(f"the file is not UTF-8: {error}", where=str(path), hint=hint) from error


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair; UTF-8 can't
    except ValueError as error:
        what = f"the line is not JSON in UTF-8: {error}"
        raise CompressError(what, where=where, hint="write one JSON object a line") from error
    if not isinstance(row, dict):
        raise CompressError("the line is not a JSON object", where=where, hint='write {"text": "…"}')
    return row


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(io.BytesIO(read_bytes(path))) as file:
            columns = [name for name in file.schema_arrow.names if name in ("text", "messages")]
            rows: list[dict[str, Any]] = file.read(columns=columns or None).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        what = f"not a parquet file: {str(error).splitlines()[0]}"
        raise CompressError(what, where=str(path), hint="check the file") from error
    return rows
