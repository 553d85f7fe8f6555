"""The questions of a suite, and how a model answered them: asked of the worker once, then remembered.

Answers are kept in the cache by everything that they depend on (checkpoint, documents, settings, versions), so a
base is scored once for all of its artifacts, and nothing is scored again after an interruption.
"""

import functools
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress import keys
from compress.artifact import digest
from compress.errors import CompressError
from compress.evaluation.compare import Results
from compress.evaluation.suite import Suite, load_sample
from compress.files import replace
from compress.paths import cache_dir
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
    return {task: [(index, name) for index, name in pairs] for task, pairs in found.items()}


def source() -> str:
    """Where documents come from: part of a stage's key, asked without reading them.

    Raises:
        CompressError: COMPRESS_DATA_DIR names no folder.
    """
    folder = os.environ.get("COMPRESS_DATA_DIR")
    if folder and not Path(folder).expanduser().is_dir():
        raise CompressError(
            "COMPRESS_DATA_DIR names no folder", where=folder,
            hint="set it to the folder with the tasks' JSONL files, or unset it to ask the hub",
        )  # fmt: skip
    return "folder" if folder else "hub"


def answers(
    model: Path, asked: Documents, *, dtype: str, threads: int, progress: Callable[[int, int], None]
) -> Results:
    """How the checkpoint in a folder answers, from the cache where it is known."""
    libraries = [importlib.metadata.version(name) for name in ("lm_eval", "torch", "transformers")]
    key = keys.stage_key(
        [keys.checkpoint_key(model), asked, dtype, libraries],
        "evaluation/accuracy.py", "evaluation/likelihood.py", "runtimes/hf.py",
    )  # fmt: skip
    path = cache_dir() / "answers" / f"{key}.json"
    try:
        kept: dict[str, Any] = json.loads(path.read_bytes())
        if kept.get("sha256") == digest(kept["results"]):
            return dict(kept["results"])
    except (OSError, ValueError, KeyError):
        pass  # not there, or damaged: asked again
    request = {"tasks": asked, "model": str(model.resolve()), "runtime": "hf", "dtype": dtype, "threads": threads}
    results: Results = call(
        "compress.evaluation.accuracy",
        request,
        what="scoring the tasks",
        where=str(model),
        progress=progress,
        online=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps({"sha256": digest(results), "results": results}).encode())
    return results


def keep(home: Path, base: Results | None, artifact: Results) -> None:
    """Writes `documents/<task>.jsonl`: every document's answers of both models, one line each."""
    folder = home / "documents"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.jsonl"):
        if old.stem not in artifact:
            old.unlink()
    for task, found in artifact.items():
        theirs = {d["document"]: d for d in base[task]["documents"]} if base else {}
        lines = []
        for mine in found["documents"]:
            about = {"document": mine["document"], "choices": mine["choices"]}
            both = {"base": theirs.get(mine["document"]), "artifact": mine}
            said = {s: {k: v for k, v in d.items() if k not in about} for s, d in both.items() if d is not None}
            lines.append(json.dumps({**about, **said}))
        replace(folder / f"{task}.jsonl", ("\n".join(lines) + "\n").encode())
