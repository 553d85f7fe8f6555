"""sha256 of a model's weights, remembered by each file's size and time: 16 GB are not read on every run."""

import contextlib
import hashlib
import json
import re
from pathlib import Path

from compress.files import replace
from compress.models.checkpoint import open_checkpoint
from compress.paths import cache_dir


def folder_digest(folder: Path) -> str:
    """sha256 over the names and bytes of a folder's weight files."""
    whole = hashlib.sha256()
    for name in sorted(set(open_checkpoint(folder).files.values())):
        whole.update(f"{name}:{remembered_digest(folder / name)}\n".encode())
    return whole.hexdigest()


def remembered_digest(path: Path) -> str:
    """sha256 of a file's bytes; read again only when its size or time has changed."""
    real = path.resolve()
    stat = real.stat()
    known = (str(real), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    stamp = hashlib.sha256(repr(known).encode()).hexdigest()
    remembered = cache_dir() / "digests" / f"{stamp}.json"
    with contextlib.suppress(OSError, ValueError):  # not there, or damaged: computed again
        found = json.loads(remembered.read_bytes())
        if isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found):
            return found
    with open(real, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        remembered.parent.mkdir(parents=True, exist_ok=True)
        replace(remembered, json.dumps(found).encode(), shared=True)
    return found
