"""What work costs in energy, where the machine tells: the processor packages' own counters (RAPL, through powercap).

Left out: NVML (no runtime here runs on a GPU), wall meters, and an estimate where nothing tells.
"""

import os
from pathlib import Path

_COUNTERS = Path("/sys/class/powercap")
WHY_NOT = "not measured: this machine shows no energy counters (RAPL) to this user"


class Meter:
    """The energy since it was made.

    Args:
        folder: where the kernel shows the counters.
    """

    def __init__(self, folder: Path = _COUNTERS) -> None:
        self._packages = [p for p in sorted(folder.glob("intel-rapl:*")) if p.name.count(":") == 1]
        self._before = [_read(p / "energy_uj") for p in self._packages]

    def joules(self) -> float | None:
        """Of all packages, whatever else ran on them; None where no counter can be read. Counters wrap around."""
        after = [_read(p / "energy_uj") for p in self._packages]
        if not after or None in after or None in self._before:
            return None
        total = 0
        for package, before, now in zip(self._packages, self._before, after, strict=True):
            assert before is not None
            assert now is not None
            total += now - before if now >= before else now - before + (_read(package / "max_energy_range_uj") or 0)
        return total / 1e6


def _read(file: Path) -> int | None:
    """The number in a file that may not be there, or not for us."""
    if not os.access(file, os.R_OK):
        return None
    return int(file.read_text())
