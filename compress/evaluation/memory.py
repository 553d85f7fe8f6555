"""The machine and this process: the processor, memory (resident and anonymous), and what is left of it and of disks.

The idea: three numbers are called "memory" and differ. *Resident* counts every page in RAM, with the pages of
mapped files (weights read by mmap) that the kernel may drop at will. *Anonymous* counts only what the process
itself made, which is what runs a machine out of memory. A *peak* is either the kernel's own high-water mark
(resident) or the largest of many samples (anonymous: the kernel keeps no mark of it).

The resident peak is `VmHWM` and not `ru_maxrss`: the latter survives fork and exec, so that a fresh child of
a large parent reports the parent's peak as its own. The kernel's counters may lag by some hundred KiB a
thread.

Left out: children (a worker reports its own), device memory, swap.
"""

import ctypes
import os
import platform
import shutil
import sys
import threading
from pathlib import Path
from types import TracebackType

import psutil

_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")


def return_large_blocks() -> None:
    """Has the C library give freed tensors of 512 KiB and more back to the system at once (glibc only).

    To be called before tensors are made: the library's threshold grows with the first large one that is freed,
    and from then on memory freed in one sublayer's shapes, which fits no other's, stays with the process.
    Measured: 130 MB of 750 in the walk over SmolLM2-135M.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 512 << 10)  # M_MMAP_THRESHOLD


def give_back() -> None:
    """Has the C library return what is free in its heap (glibc only): a tokenised text leaves 70 MB behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def current_rss_bytes() -> int:
    """Resident memory of this process now, mapped file pages included, in bytes."""
    return _status_bytes("VmRSS") or int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The highest resident memory of this process since it started, mapped file pages included, in bytes."""
    peak = _status_bytes("VmHWM")
    return peak if peak is not None else _maxrss_bytes()


def current_anonymous_bytes() -> tuple[int, str]:
    """Anonymous memory of this process now in bytes, and the name of the counter it was read from.

    Where the system does not tell anonymous memory apart, it is resident memory, and the name says so.
    """
    anonymous = _status_bytes("RssAnon")
    if anonymous is not None:
        return anonymous, "RssAnon"
    return int(psutil.Process().memory_info().rss), "rss (psutil)"


def available_memory_bytes() -> int:
    """Memory that can be had without swapping, in bytes; a container's limit counts where it is lower."""
    available = int(psutil.virtual_memory().available)
    left = cgroup_left_bytes(_CGROUP)
    return available if left is None else min(available, left)


def cgroup_left_bytes(root: Path) -> int | None:
    """What a cgroup v2 limit at `root` leaves, in bytes; None without a limit. Reclaimable files are free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def free_disk_bytes(path: Path) -> int:
    """Free space in bytes for this user on the disk where `path` is, or will be made."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


class PeakAnonymous:
    """The peak of this process's anonymous memory over a `with` block, sampled by a thread.

    A peak shorter than `interval_s` can be missed. Children and file pages are not counted. After the block:
    `peak_bytes`, `before_bytes` (on entry) and `source` (the counter's name).
    """

    def __init__(self, interval_s: float = 0.02) -> None:
        self.interval_s = interval_s
        self.before_bytes = self.peak_bytes = 0
        self.source = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeakAnonymous":
        self.before_bytes, self.source = current_anonymous_bytes()
        self.peak_bytes = self.before_bytes
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="peak-anonymous", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, current_anonymous_bytes()[0])


def _status_bytes(key: str) -> int | None:
    """One counter of /proc/self/status in bytes; None where there is no such file or line."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _maxrss_bytes() -> int:
    """The peak where there is no /proc: getrusage's, whose unit is KiB, except on macOS (bytes)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_name() -> str:
    """The processor's name and how many this machine has of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    return f"{name} × {os.cpu_count()}"
