"""What is measured once the artifact is verified: stages by their keys, each published as it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress import artifact, keys
from compress.evaluation import card, draw, memory, page, report, speed
from compress.evaluation.metrics import Row, row
from compress.evaluation.worker import measure_fidelity
from compress.files import replace
from compress.job import Job, weights_folder
from compress.plan_text import plan_text
from compress.verify import Request, verify

Progress = Callable[[str, int, int], None]  # what runs, how much is done, of how much


def evaluate(
    job: Job, tokens_NT: torch.Tensor, folder: Path, document: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """The suite's stages that the lock does not name yet; each is published as it ends."""
    conditions = {
        "runtime": "stream", "dtype": "float32", "seq_len": job.suite.text.seq_len,
        "data": artifact.digest(tokens_NT.tolist())[:16],
    }  # fmt: skip
    compress = artifact.read_lock(folder)["stages"]["compress"]
    points = [p.model_dump() for p in job.suite.speed]
    stages: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        (
            "whole",
            keys.stage_key([compress], "verify.py", "runtimes/hf.py"),
            lambda: _reload(job, folder, document, tokens_NT, progress),
        ),
        (
            "fidelity",
            keys.stage_key([compress, conditions], "evaluation/fidelity.py", "evaluation/stream.py"),
            lambda: _fidelity(job, folder, document, tokens_NT, conditions, progress),
        ),
        (
            "speed",
            keys.stage_key(
                [compress, points, torch.get_num_threads(), speed.cpu_name()], "evaluation/speed.py", "runtimes/hf.py"
            ),
            lambda: _speed(job, folder, document, progress),
        ),
    ]
    for name, key, stage in stages:
        lock = artifact.read_lock(folder)
        if lock["stages"].get(name) != key:
            document = stage()
            lock["stages"][name] = key
            publish(job, folder, document, lock)
    return document


def _fits(job: Job) -> bool:
    """Whether the whole model in float32 takes under half the free memory."""
    return 2 * job.plan.bytes_before < memory.available_memory_bytes() // 2


def _reload(
    job: Job, folder: Path, document: dict[str, Any], tokens_NT: torch.Tensor, progress: Progress
) -> dict[str, Any]:
    """Plain transformers loads the artifact, must give our logits, and generates."""
    if not _fits(job):
        return _with_note(document, "not loaded whole by transformers: in float32 it does not fit in memory here")
    progress("reload", 0, 1)
    found = verify(
        Request(
            artifact=str(folder.resolve()), base=str(weights_folder(job.source).resolve()), state=None,
            tokens=tokens_NT[:1].tolist(), whole=True, threads=torch.get_num_threads(),
        )
    )  # fmt: skip
    progress("reload", 1, 1)
    return {**document, "verified": {**document["verified"], **found}}


def _fidelity(
    job: Job, folder: Path, document: dict[str, Any], tokens_NT: torch.Tensor, conditions: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Perplexity and divergence on the suite's text."""
    rows = measure_fidelity(
        weights_folder(job.source), folder, tokens_NT.tolist(), task=job.suite.text.name, conditions=conditions,
        threads=torch.get_num_threads(), progress=lambda done, total: progress("fidelity", done, total),
    )  # fmt: skip
    made = {"heldout", "walk", "speed", "checkpoint"}  # the tasks of other stages' rows
    return _with_rows(document, rows, lambda r: r["task"] not in made and r["metric"] != "block_error")


def size_rows(job: Job, folder: Path) -> list[Row]:
    """Bytes and bits of base and artifact."""
    coded = [r for r in job.plan.rows if r.scheme]
    bits = 8 * sum(r.bytes_before for r in coded) / sum(r.shape[0] * r.shape[1] for r in coded)
    kv = job.plan.kv_bytes_per_token
    return [
        row("size_bytes", "base", "checkpoint", artifact.checkpoint_bytes(weights_folder(job.source))),
        row("size_bytes", "artifact", "checkpoint", artifact.checkpoint_bytes(folder)),
        row("bpw", "base", "checkpoint", bits),
        row("bpw", "artifact", "checkpoint", job.plan.bpw),
        row("kv_bytes_per_token", "base", "checkpoint", kv),
        row("kv_bytes_per_token", "artifact", "checkpoint", kv),
    ]


def _speed(job: Job, folder: Path, document: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Speed and memory of base and artifact, in turn."""
    if not job.suite.speed:
        return _with_rows(document, [], lambda r: r["task"] == "speed")
    if not _fits(job):
        return _with_note(document, "speed not measured: the whole model does not fit in memory here")
    rows = speed.measure(
        weights_folder(job.source), folder, grid=[speed.Point(p.batch, p.context, p.output) for p in job.suite.speed],
        threads=torch.get_num_threads(), on_progress=lambda _, share: progress("speed", round(100 * share), 100),
    )  # fmt: skip
    return _with_rows(document, rows, lambda r: r["task"] == "speed")


def _with_note(document: dict[str, Any], note: str) -> dict[str, Any]:
    notes = [*document["artifact"]["notes"], note]
    return {**document, "artifact": {**document["artifact"], "notes": list(dict.fromkeys(notes))}}


def _with_rows(document: dict[str, Any], rows: list[Row], stale: Callable[[Row], bool]) -> dict[str, Any]:
    kept = [r for r in document["measurements"] if not stale(r)]
    return {**document, "measurements": kept + rows}


def publish(job: Job, folder: Path, document: dict[str, Any], lock: dict[str, Any]) -> None:
    """Writes report, pages and card, and the lock last."""
    report.write(folder, document)
    drawn = draw.draw(document, folder)
    text = plan_text(job.plan)
    replace(folder / "report.html", page.html(document, job.recipe.text, text, drawn).encode())
    pictures = drawn.pictures if drawn else ()
    readme = card.card(document, job.recipe.name, job.recipe.text, job.source.license, pictures)
    replace(folder / "README.md", readme.encode())
    skipped = {artifact.LOCK}
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in skipped)
    known = {n: d for n, d in lock.get("files", {}).items() if n.endswith(".safetensors")}  # written once
    lock["files"] = {p.name: known.get(p.name) or artifact.file_digest(p) for p in files}
    artifact.write_json(folder / artifact.LOCK, lock)
