"""Writing files so that a crash leaves the old content or the new one, never a part."""

import os
from pathlib import Path


def replace(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Writes `data` to a new file, forces it to the disk and renames it to `path`.

    Args:
        shared: another program may write the same file now (a cache): the new file's name is then this process's own.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
