"""The questions of a suite, and how a model answered them: asked of the worker once, then remembered.

Answers are kept in the cache by everything that they depend on (checkpoint, documents, settings, versions), so a
base is scored once for all of its artifacts, and nothing is scored again after an interruption.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress import keys
from compress.artifact import DOCUMENTS, digest, file_digest
from compress.errors import CompressError, nearest
from compress.evaluation.compare import Results
from compress.evaluation.suite import Suite, load_sample
from compress.files import replace
from compress.paths import cache_dir, data_dir
from compress.workers import call

Documents = dict[str, list[tuple[int, str]]]  # for each task, places in its data and hashes


@functools.cache
def documents(suite: Suite) -> Documents:
    """The documents of a suite with tasks; the same suite is asked for once in a process.

    Raises:
        CompressError: a task or its documents cannot be had.
    """
    assert suite.accuracy is not None
    sample = load_sample(suite)
    tasks = {task.task: sample.documents[task.task] if sample else None for task in suite.accuracy.tasks}
    what, where = "reading the tasks", f"suite {suite.name}"
    found: dict[str, Any] = call("compress.evaluation.accuracy", {"tasks": tasks}, what=what, where=where, online=True)
    for task in suite.accuracy.tasks:
        reported = found[task.task]["metrics"]
        if task.metric not in reported:
            raise CompressError(
                f"task {task.task!r} does not report {task.metric!r}; {nearest(task.metric, reported)}", where=where,
                hint="name one of its own metrics in the suite",
            )  # fmt: skip
    return {task: [(index, name) for index, name in answer["documents"]] for task, answer in found.items()}


def source(suite: Suite) -> list[Any]:
    """What the questions depend on, told without reading them: part of a stage's key.

    Raises:
        CompressError: COMPRESS_DATA_DIR names no folder.
    """
    folder = os.environ.get("COMPRESS_DATA_DIR")
    if folder and not Path(folder).expanduser().is_dir():
        raise CompressError(
            "COMPRESS_DATA_DIR names no folder", where=folder,
            hint="set it to the folder with the tasks' JSONL files, or unset it to ask the hub",
        )  # fmt: skip
    here = data_dir("eval") / "tasks"
    asked = suite.accuracy.tasks if suite.accuracy else ()
    ours = [f for t in asked for f in (*sorted((here / t.task).glob("*")), here / "local" / f"{t.task}.yaml")]
    theirs = sorted(Path(folder).expanduser().glob("*.jsonl")) if folder else []
    stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in theirs]
    sample = load_sample(suite)
    return [
        [file_digest(f) for f in ours if f.is_file()], stamps, sample.model_dump() if sample else None,
        importlib.metadata.version("lm_eval"),
    ]  # fmt: skip


def answers(
    model: Path, asked: Documents, *, runtime: str, dtype: str, threads: int, progress: Callable[[int, int], None]
) -> Results:
    """How the checkpoint in a folder answers, from the cache where it is known."""
    libraries = [importlib.metadata.version(name) for name in ("lm_eval", "torch", "transformers")]
    key = keys.stage_key(
        [keys.checkpoint_key(model), asked, runtime, dtype, libraries],
        "evaluation/accuracy.py", "evaluation/likelihood.py", "evaluation/blockwise.py", "runtimes/hf.py",
    )  # fmt: skip
    request = {"tasks": asked, "model": str(model.resolve()), "runtime": runtime, "dtype": dtype, "threads": threads}

    def ask() -> Any:
        return call(
            "compress.evaluation.accuracy", request, what="scoring the tasks", where=str(model), progress=progress,
            online=True,
        )  # fmt: skip

    return dict(remembered("answers", key, ask))


def remembered(kind: str, key: str, ask: Callable[[], Any]) -> Any:
    """An answer, plain data, from the folder `kind` of the cache; asked for where it is not there, or damaged."""
    path = cache_dir() / kind / f"{key}.json"
    try:
        kept = json.loads(path.read_bytes())
        if kept["sha256"] == digest(kept["results"]):
            return kept["results"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: asked again
    results = ask()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps({"sha256": digest(results), "results": results}).encode(), shared=True)
    return results


def forget(home: Path) -> None:
    """Deletes the documents' answers that an earlier suite left."""
    shutil.rmtree(home / DOCUMENTS, ignore_errors=True)


def keep(home: Path, base: Results | None, artifact: Results) -> None:
    """Writes `documents/<task>.jsonl`: every document's answers of both models, one line each."""
    forget(home)
    folder = home / DOCUMENTS
    folder.mkdir()
    for task, found in artifact.items():
        theirs = {d["document"]: d for d in base[task]["documents"]} if base else {}
        lines = []
        for mine in found["documents"]:
            about = {"document": mine["document"], "choices": mine["choices"]}
            both = {"base": theirs.get(mine["document"]), "artifact": mine}
            said = {s: {k: v for k, v in d.items() if k not in about} for s, d in both.items() if d is not None}
            lines.append(json.dumps({**about, **said}))
        replace(folder / f"{task}.jsonl", ("\n".join(lines) + "\n").encode())
