"""Writing files so that a crash leaves the old content or the new one, never a part."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

_LONGEST = 200  # bytes of a name; disks take 255, and files that are not finished have longer ones


def replace(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Writes `data` to a new file, forces it to the disk and renames it to `path`.

    Args:
        shared: another program may write the same file now (a cache): the new file's name is then this process's own.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk names no file by itself
        if error.errno is not None:
            error.filename = error.filename or str(path)
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync(path.parent)


def joined_name(names: Iterable[str]) -> str:
    """A folder's name made of several; what would be too long for a disk is cut, and ends in a hash of the whole."""
    whole = "--vs--".join(name.replace("/", "--") for name in names)
    if len(os.fsencode(whole)) <= _LONGEST:
        return whole
    kept = os.fsencode(whole)[: _LONGEST - 10].decode(errors="ignore")
    return f"{kept}--{hashlib.sha256(os.fsencode(whole)).hexdigest()[:8]}"


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(out: Path, fill: Callable[[Path], None]) -> Path:
    """Makes a folder that is complete when it exists: filled beside `out`, then renamed; `out`.

    Two at once, or a kill midway, leave either nothing or the whole: a lock is held, and what a killed run left is
    deleted.

    Args:
        out: the folder; when it exists nothing is done.
        fill: gets an empty folder, whose parent is for its scratch files.
    """
    with _exclusive(out.with_name(out.name + ".lock")):
        if out.is_dir():
            return out
        for stale in out.parent.glob(f".{escape(out.name)}.*"):  # of a run that was killed; the lock is ours
            shutil.rmtree(stale)
        work = out.with_name(f".{out.name}.{os.getpid()}")
        folder = work / "checkpoint"
        folder.mkdir(parents=True)
        try:
            fill(folder)
            for path in folder.iterdir():
                path.chmod(0o644)  # safetensors makes its file private to the owner
            for path in [*folder.iterdir(), folder]:
                sync(path)
            folder.rename(out)
            sync(out.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return out


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Holds a file lock; the kernel lets go of it when the process dies."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
