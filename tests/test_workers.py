"""Processes of our own: an answer, a refusal, a death, progress, and a request larger than a pipe."""

import signal
import sys
from pathlib import Path

import pytest

from compress import workers
from compress.errors import CompressError

WORKER = """
import os, signal, sys
from compress.errors import CompressError
from compress.workers import serve, tell

def answer(request):
    if request["do"] == "refuse":
        raise CompressError("no such thing", where="there", hint="look elsewhere")
    if request["do"] == "die":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    tell(1, 2)
    return {"size": len(request["load"]), "threads": os.environ["OMP_NUM_THREADS"]}

if __name__ == "__main__":
    raise SystemExit(serve(answer))
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "a_worker"


def call(worker: str, **request: object) -> object:
    told: list[tuple[int, int]] = []
    found = workers.call(
        worker, {"threads": 3, "load": "", **request}, what="the work", where="here",
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(1, 2)]
    return found


def test_a_large_request_is_answered(worker: str) -> None:
    assert call(worker, do="answer", load="x" * 3_000_000) == {"size": 3_000_000, "threads": "3"}


def test_a_refusal_is_the_workers_own(worker: str) -> None:
    with pytest.raises(CompressError) as caught:
        call(worker, do="refuse")
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("no such thing", "there", "look elsewhere")


def test_a_death_names_the_work_and_the_last_words(worker: str) -> None:
    with pytest.raises(CompressError, match=r"(?s)the work failed.*SIGKILL.*last words") as caught:
        call(worker, do="die", load="x" * 3_000_000)
    assert "memory" in str(caught.value.hint)


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"(?s)exit code 1.*No module named"):
        workers.call("no_such_module_here", {}, what="the work", where=sys.executable)


def test_words_of_a_silent_death() -> None:
    assert "said nothing" in workers.death("it", "place", -signal.SIGTERM, []).what
