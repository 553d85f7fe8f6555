"""What is measured of a checkpoint that is there: stages by their keys, each published as it ends."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress import artifact, keys
from compress.evaluation import card, draw, memory, page, questions, report, speed
from compress.evaluation.compare import Results, accuracy_rows, verdict
from compress.evaluation.metrics import Row, row
from compress.evaluation.suite import Suite
from compress.evaluation.worker import measure_fidelity, streamed
from compress.files import replace
from compress.plan import read_plan
from compress.plan_text import plan_text
from compress.runtimes.hf import parameter_count
from compress.verify import Request, verify

Progress = Callable[[str, int, int], None]  # what runs, how much is done, of how much
Document = dict[str, Any]
_OTHERS = ("heldout", "walk", "speed", "checkpoint")  # tasks of rows that no stage of fidelity or accuracy makes


@dataclass(frozen=True)
class Evaluation:
    """What is measured of a checkpoint.

    Attributes:
        home: the folder of report and lock; for an artifact of ours, the artifact's.
        artifact, base: folders of checkpoints; without a base nothing is compared.
        suite: what is measured.
        tokens_NT: the windows of the suite's text.
        delta: the difference in accuracy that still counts as "as good".
        made: the key of the artifact's weights.
        ours: whether the artifact was made here, so that transformers must give the logits that we compute.
    """

    home: Path
    artifact: Path
    base: Path | None
    suite: Suite
    tokens_NT: torch.Tensor
    delta: float
    made: str
    ours: bool

    @property
    def depends(self) -> list[Any]:
        """What every stage depends on, as plain data."""
        return [self.made, None if self.base is None else keys.checkpoint_key(self.base)]


def evaluate(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """The suite's stages that the lock does not name yet; each is published as it ends."""
    stages = _stages(asked)
    lock = artifact.read_lock(asked.home)
    missing = [name for name, (key, _) in stages.items() if lock["stages"].get(name) != key]
    for name in missing:
        key, stage = stages[name]
        document = with_verdict(stage(asked, document, progress), asked)
        lock["stages"][name] = key
        lock["suite"] = asked.suite.model_dump(mode="json")
        document = publish(asked.home, document, lock, charts=name == missing[-1])
    return document


def check(asked: Evaluation) -> None:
    """Refuses what the stages that are to run would refuse, before any of them and before the walk.

    Raises:
        CompressError: a task of the suite, or its documents, cannot be had.
    """
    key, _ = _stages(asked)["accuracy"]
    if asked.suite.accuracy and artifact.read_lock(asked.home).get("stages", {}).get("accuracy") != key:
        questions.documents(asked.suite)


Stage = Callable[[Evaluation, Document, Progress], Document]


def _stages(asked: Evaluation) -> dict[str, tuple[str, Stage]]:
    """Each stage's key and function, in the order in which they run."""
    points = [p.model_dump() for p in asked.suite.speed]
    tasks = asked.suite.accuracy.model_dump() if asked.suite.accuracy else None
    found: dict[str, tuple[str, Stage]] = {}
    if asked.ours:
        found["whole"] = keys.stage_key([asked.made], "verify.py", "runtimes/hf.py"), _reload
    text = [*asked.depends, artifact.digest(asked.tokens_NT.tolist())]
    found["fidelity"] = (
        keys.stage_key(text, "evaluation/fidelity.py", "evaluation/worker.py", "evaluation/stream.py"),
        _fidelity,
    )
    answered = [*asked.depends, tasks, questions.source()]
    sources = ("evaluation/accuracy.py", "evaluation/likelihood.py", "evaluation/compare.py", "runtimes/hf.py")
    found["accuracy"] = keys.stage_key(answered, *sources), _accuracy
    timed = [*asked.depends, points, torch.get_num_threads(), speed.cpu_name()]
    found["speed"] = keys.stage_key(timed, "evaluation/speed.py", "runtimes/hf.py"), _speed
    return found


def _fits(asked: Evaluation, bytes_per_weight: int = 4) -> bool:
    """Whether the whole model takes under half the free memory."""
    return bytes_per_weight * parameter_count(asked.artifact) < memory.available_memory_bytes() // 2


def _reload(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """Plain transformers loads the artifact, must give our logits, and generates."""
    if not _fits(asked):
        return _with_note(document, "not loaded whole by transformers: in float32 it does not fit in memory here")
    progress("reload", 0, 1)
    found = verify(
        Request(
            artifact=str(asked.artifact.resolve()), base="", state=None, tokens=asked.tokens_NT[:1].tolist(),
            whole=True, threads=torch.get_num_threads(),
        )
    )  # fmt: skip
    progress("reload", 1, 1)
    return {**document, "verified": {**document["verified"], **found}}


def _fidelity(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """Perplexity, and divergence from the base, on the suite's text."""
    folders = [folder for folder in (asked.base, asked.artifact) if folder]
    runtime = "stream" if all(map(streamed, folders)) else "hf"

    def stale(r: Row) -> bool:
        return r["task"] not in _OTHERS and r["metric"] != "block_error" and "backend" not in r["conditions"]

    if runtime == "hf" and not _fits(asked):
        note = "perplexity not measured: this architecture or format is not streamed, and does not fit in memory whole"
        return _with_note(_with_rows(document, [], stale), note)
    conditions = {
        "runtime": runtime, "dtype": "float32", "seq_len": asked.suite.text.seq_len,
        "data": artifact.digest(asked.tokens_NT.tolist())[:16], **artifact.coded_activations(asked.artifact),
    }  # fmt: skip
    rows = measure_fidelity(
        asked.base, asked.artifact, asked.tokens_NT.tolist(), task=asked.suite.text.name, conditions=conditions,
        threads=torch.get_num_threads(), progress=lambda done, total: progress("fidelity", done, total),
    )  # fmt: skip
    return _with_rows(document, rows, stale)


def _accuracy(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """The suite's tasks, by base and artifact on the same documents."""

    def stale(r: Row) -> bool:
        return "backend" in r["conditions"]

    if asked.suite.accuracy is None:
        return _with_rows(document, [], stale)
    dtype = next((d for d, size in (("float32", 4), ("bfloat16", 2)) if _fits(asked, size)), None)
    if dtype is None:
        note = "accuracy not measured: the whole model does not fit in memory here"
        return _with_note(_with_rows(document, [], stale), note)
    documents = questions.documents(asked.suite)

    def answers(folder: Path, name: str) -> Results:
        return questions.answers(
            folder, documents, dtype=dtype, threads=torch.get_num_threads(),
            progress=lambda done, total: progress(name, done, total),
        )  # fmt: skip

    base = None if asked.base is None else answers(asked.base, "base tasks")
    found = answers(asked.artifact, "tasks")
    questions.keep(asked.home, base, found)
    conditions = {
        "runtime": "hf", "device": "cpu", "dtype": dtype, "num_fewshot": 0, "chat_template": False,
        "sample": asked.suite.accuracy.sample or "all",
        "data": artifact.digest([[name for _, name in pairs] for pairs in documents.values()])[:16],
        **artifact.coded_activations(asked.artifact),
    }  # fmt: skip
    return _with_rows(document, accuracy_rows(base, found, asked.suite, conditions), stale)


def _speed(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """Speed and memory of base and artifact, in turn."""

    def stale(r: Row) -> bool:
        return bool(r["task"] == "speed")

    if not asked.suite.speed:
        return _with_rows(document, [], stale)
    if not _fits(asked):
        return _with_note(document, "speed not measured: the whole model does not fit in memory here")
    rows = speed.measure(
        asked.base, asked.artifact, grid=[speed.Point(p.batch, p.context, p.output) for p in asked.suite.speed],
        threads=torch.get_num_threads(), on_progress=lambda _, share: progress("speed", round(100 * share), 100),
    )  # fmt: skip
    return _with_rows(document, rows, stale)


def size_rows(folder: Path, base: Path | None) -> list[Row]:
    """Bytes of the checkpoints."""
    rows = [row("size_bytes", "artifact", "checkpoint", artifact.checkpoint_bytes(folder))]
    if base is not None:
        rows.insert(0, row("size_bytes", "base", "checkpoint", artifact.checkpoint_bytes(base)))
    return rows


def with_verdict(document: Document, asked: Evaluation) -> Document:
    """The document with the verdict that its rows support."""
    return {**document, "verdict": verdict(document["measurements"], asked.suite, asked.delta)}


def _with_note(document: Document, note: str) -> Document:
    notes = [*document["artifact"]["notes"], note]
    return {**document, "artifact": {**document["artifact"], "notes": list(dict.fromkeys(notes))}}


def _with_rows(document: Document, rows: list[Row], stale: Callable[[Row], bool]) -> Document:
    kept = [r for r in document["measurements"] if not stale(r)]
    return {**document, "measurements": kept + rows}


def publish(home: Path, document: Document, lock: dict[str, Any], *, charts: bool) -> Document:
    """Writes report, pages and card, and the lock last; recipe and plan are what the folder holds.

    Args:
        charts: whether to draw them; they take seconds, so only after the last stage.
    """
    report.write(home, document)
    document = report.read(home)  # the pages show what is stored
    drawn = draw.draw(document, home) if charts else None
    recipe_file = home / "recipe.yaml"
    recipe_yaml = recipe_file.read_text(encoding="utf-8") if recipe_file.is_file() else None
    plan = read_plan(home)
    text = plan_text(plan) if plan else None
    replace(home / "report.html", page.html(document, recipe_yaml, text, drawn).encode())
    if recipe_yaml is not None:
        name = str(document["artifact"].get("recipe") or recipe_file.stem)
        readme = card.card(document, name, recipe_yaml, lock["model"]["license"], drawn.pictures if drawn else ())
        replace(home / "README.md", readme.encode())
    files = sorted(p for p in home.iterdir() if p.is_file() and p.name != artifact.LOCK)
    known = {n: d for n, d in lock.get("files", {}).items() if n.endswith(".safetensors")}  # written once
    lock["files"] = {p.name: known.get(p.name) or artifact.file_digest(p) for p in files}
    artifact.write_json(home / artifact.LOCK, lock)
    return document
