"""sha256 of a model's weights, remembered by each file's size and time: 16 GB are not read on every run."""

import hashlib
import json
from pathlib import Path

from compress.files import replace
from compress.models.load import open_checkpoint
from compress.paths import cache_dir


def folder_digest(folder: Path) -> str:
    """sha256 over the names and bytes of a folder's weight files."""
    whole = hashlib.sha256()
    for name in sorted(set(open_checkpoint(folder).files.values())):
        whole.update(f"{name}:{_file_digest(folder / name)}\n".encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    real = path.resolve()
    stat = real.stat()
    known = (str(real), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    stamp = hashlib.sha256(repr(known).encode()).hexdigest()
    remembered = cache_dir() / "digests" / f"{stamp}.json"
    if remembered.is_file():
        return str(json.loads(remembered.read_text()))
    with open(real, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    remembered.parent.mkdir(parents=True, exist_ok=True)
    replace(remembered, json.dumps(found).encode())
    return found
