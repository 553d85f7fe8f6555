"""Work in a process of its own: a fresh interpreter, a JSON request in, a JSON answer out.

One mechanism for all of it: verification, measurements, drawing text. A worker is a module that ends in
`raise SystemExit(serve(answer))`. The request and the answer go through files, so that neither side waits for
the other to read; what the worker says on standard error is kept for the error if it dies.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import CompressError

_REFUSED = 3  # exit code of a worker whose answer is a CompressError
_ROOT = Path(__file__).resolve().parents[1]


def call(
    module: str,
    request: dict[str, Any],
    *,
    what: str,
    where: str,
    progress: Callable[[int, int], None] | None = None,
    online: bool = False,
) -> Any:
    """Runs `module` on `request` in a fresh process and returns its answer.

    Args:
        request: plain data; `threads` also sets the worker's OpenMP threads.
        what: what the worker does, for the error.
        where: the folder it is about.
        progress: told of lines "done total" on the worker's standard error.
        online: the worker may ask the hub; others never do.
    Raises:
        CompressError: the worker refused (its own error), or died (with its last words).
    """
    said: deque[str] = deque(maxlen=8)
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as answered:
        json.dump(request, asked)
        asked.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", module], stdin=asked, stdout=answered, stderr=subprocess.PIPE,
            encoding="utf-8", errors="replace", env=_environment(request.get("threads"), online),
        ) as worker:  # fmt: skip
            try:
                for line in worker.stderr or ():
                    done, _, total = line.strip().partition(" ")
                    if progress and done.isdecimal() and total.isdecimal():
                        progress(int(done), int(total))
                    else:
                        said.append(line.rstrip())
                worker.wait()
            finally:  # an interrupted caller leaves no worker behind
                if worker.poll() is None:
                    worker.kill()
        answered.seek(0)
        lines = answered.read().strip().splitlines()
    if worker.returncode == 0 and lines:
        return json.loads(lines[-1])
    if worker.returncode == _REFUSED and lines:
        raise CompressError(**json.loads(lines[-1]))
    raise death(what, where, worker.returncode, list(said))


def death(what: str, where: str, code: int, said: list[str]) -> CompressError:
    """The error for a worker that ended with exit code `code` (negative: a signal)."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    words = "\n    ".join(said or ["(it said nothing)"])
    hint = "the machine probably ran out of memory; close other programs" if code == -signal.SIGKILL else None
    return CompressError(f"{what} failed: its process ended with {how}. It said:\n    {words}", where=where, hint=hint)


def serve(answer: Callable[[dict[str, Any]], Any]) -> int:
    """The worker's side: answers the request on standard input; the exit code."""
    request = json.load(sys.stdin)
    try:
        answered, code = answer(request), 0
    except CompressError as error:
        answered, code = {"what": error.what, "where": error.where, "hint": error.hint}, _REFUSED
    sys.stdout.write(json.dumps(answered) + "\n")
    return code


def tell(done: int, total: int) -> None:
    """Tells the caller of a worker how far it is."""
    sys.stderr.write(f"{done} {total}\n")
    sys.stderr.flush()


def _environment(threads: int | None, online: bool) -> dict[str, str]:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **({} if online else {"HF_HUB_OFFLINE": "1"}),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONIOENCODING": "utf-8",
        **count,
    }
