"""How fast this machine reads memory and multiplies: what a speed is held against.

The idea: a decode pass reads every weight once, so no runtime is faster than memory; a prompt's passes multiply, so
none is faster than the matrix unit. Both limits are measured by torch, in a fresh process with as many threads: the
dot product of two float32 streams of 256 MiB, which reads fastest of what torch has (sums, maxima and products of a
matrix with a vector were slower), and products of bfloat16 matrices 2048 wide. The best of several tries counts.

Left out: caches (streams are larger than they are), several sockets, devices other than the CPU.
"""

import time
from collections.abc import Callable
from typing import Any

from compress.workers import call, serve

_STREAM = 1 << 26  # float32 numbers
_WIDE = 2048
_TRIES = 5


def limits(threads: int) -> dict[str, float]:
    """`bandwidth`, bytes a second, and `rate`, multiplications and additions in bfloat16 a second.

    Raises:
        CompressError: the worker died.
    """
    found: dict[str, float] = call("compress.evaluation.machine", {"threads": threads},
                                   what="measuring the machine", where="this machine")  # fmt: skip
    return found


def answer(request: dict[str, Any]) -> dict[str, float]:
    """The worker."""
    import torch

    torch.set_num_threads(request["threads"])
    a, b = torch.ones(_STREAM), torch.ones(_STREAM)
    bandwidth = 8 * _STREAM / _best(lambda: torch.dot(a, b))
    wide = torch.ones(_WIDE, _WIDE, dtype=torch.bfloat16)
    return {"bandwidth": bandwidth, "rate": 2 * _WIDE**3 / _best(lambda: wide @ wide)}


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several tries, after one."""
    work()
    taken = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    raise SystemExit(serve(answer))
