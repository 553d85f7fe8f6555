"""The whole product on one page: recipe, plan, walk, artifact, proof, measurements, report.

Every stage has a key, the hash of what it depends on; a stage whose key stands in the lock is not run again.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from compress import artifact, keys, measure
from compress.calibration.data import Windows
from compress.calibration.state import State, open_state
from compress.calibration.walk import Smooth, WalkSpec, walk
from compress.errors import CompressError
from compress.evaluation import memory, questions, report
from compress.evaluation.fidelity import compare_hidden, fidelity_rows
from compress.evaluation.metrics import Row, row
from compress.evaluation.text import show_bytes
from compress.files import replace
from compress.job import Job, check_device, data_document, fetch, prepare, refuse, weights_folder, with_kept_data
from compress.measure import Progress, publish, size_rows
from compress.models.digest import folder_digest
from compress.models.load import calibration_dtype
from compress.plan import Plan
from compress.recipe import method_of
from compress.schemes import KV_CACHES
from compress.verify import Request, Unverified, verify
from compress.windows import is_done, keep_windows, tokens_of


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the artifact's folder and its report."""

    folder: Path
    report: dict[str, Any]


def run(
    recipe: str,
    model: str,
    out: Path | None,
    *,
    changes: Mapping[str, Any] | None = None,
    device: str = "auto",
    evaluate: bool = True,
    progress: Progress,
) -> Outcome:
    """From a recipe and a model to a verified, measured artifact.

    Args:
        out: the artifact's folder; by default `artifacts/<model>--<recipe>`.
        changes: values in place of the recipe's, by dotted keys ("calibration.samples").
        device: "auto" or "cpu".

    Raises:
        CompressError: anything that a person can mend; nothing that was finished is lost.
    """
    memory.return_large_blocks()
    check_device(device)
    job = prepare(recipe, model, changes=changes or {}, evaluate=evaluate)
    refuse(job)
    folder = out or Path("artifacts") / f"{job.source.name}--{job.recipe.name}"
    artifact.check_folder(folder, job.source.path)
    if not (folder / artifact.LOCK).is_file():  # else it may be done already, and needs little
        _check_machine(job.plan, folder)
    if evaluate and job.suite.accuracy and "accuracy" not in artifact.read_lock(folder).get("stages", {}):
        questions.documents(job.suite)  # what cannot be had is said before anything is fetched
    progress("model", 0, 1)
    job = fetch(with_kept_data(job, folder), model)
    progress("model", 1, 1)
    key = keys.compress_key(job.recipe.recipe, job.plan, job.source, job.data)
    windows, tokens_NT = tokens_of(job, folder, key, evaluate)
    asked = _evaluation(job, folder, key, tokens_NT) if tokens_NT is not None else None
    if asked is not None:
        measure.check(asked)
    memory.give_back()
    if windows is not None:
        _check_machine(job.plan, folder)
        with artifact.claimed(folder):
            if not is_done(folder, key):  # another run may have ended meanwhile
                _make(job, windows, folder, key, progress, unfinished=asked is not None)
    with artifact.claimed(folder):
        _keep_recipe(job, folder)
        document = report.read(folder)
        if asked is not None:
            document = measure.evaluate(asked, document, progress)
    return Outcome(folder, document)


def _keep_recipe(job: Job, folder: Path) -> None:
    """The recipe as it is asked for now: what changes no weight (summary, suite, delta) makes nothing anew."""
    lock = artifact.read_lock(folder)
    if lock["recipe"] == job.recipe.recipe.document():
        return
    replace(folder / "recipe.yaml", job.recipe.text.encode())
    lock |= {"recipe": job.recipe.recipe.document(), "changes": dict(job.recipe.changes)}
    publish(folder, report.read(folder), lock, charts=False)


def _evaluation(job: Job, folder: Path, key: str, tokens_NT: torch.Tensor) -> measure.Evaluation:
    return measure.Evaluation(
        home=folder, artifact=folder, base=weights_folder(job.source), suite=job.suite, tokens_NT=tokens_NT,
        delta=job.recipe.recipe.evaluate.delta, made=key, ours=True,
    )  # fmt: skip


def _make(job: Job, windows: Windows, folder: Path, key: str, progress: Progress, *, unfinished: bool) -> None:
    """The verified artifact, and the report as far as making it tells; `unfinished` when measurements follow."""
    state = _open(job, windows, folder, key)
    rows, notes = _compress(job, windows, state, progress)
    lock = _close(job, windows, folder, state)
    rows += size_rows(folder, weights_folder(job.source)) + _bit_rows(job)
    progress("verify", 0, 1)
    request = Request(
        artifact=str(folder.resolve()), base=str(weights_folder(job.source).resolve()),
        state=str(state.folder.resolve()),
        tokens=windows.heldout_NT.tolist(), whole=False, threads=torch.get_num_threads(),
    )  # fmt: skip
    try:
        found = verify(request)
    except Unverified:
        artifact.clear_state(folder)  # what it holds led to this: the next run begins anew
        raise
    progress("verify", 1, 1)
    document = report.build(
        artifact=_identity(job, folder, notes), base=_base_identity(job), verified=found, measurements=rows
    )
    lock["stages"] = {"compress": key}
    publish(folder, measure.with_note(document, measure.UNFINISHED) if unfinished else document, lock, charts=False)
    artifact.remove_state(folder)


def _open(job: Job, windows: Windows, folder: Path, key: str) -> State:
    """The state that an earlier run of the same key left, or a new one; what it replaces is deleted first."""
    tokens = (windows.tokens_NT, windows.heldout_NT)
    hidden_size = int(job.model.skeleton.config.hidden_size)  # type: ignore[arg-type, union-attr]
    where, statistics = folder / artifact.STATE, job.plan.statistics != "none"
    if artifact.holds_state(folder, key):
        state = open_state(where, tokens, hidden_size, statistics)
        if state is not None:
            return state
    job.model.check_ends()
    artifact.clear_state(folder)
    replace(where / "data.json", json.dumps(data_document(job)).encode())
    keep_windows(windows, folder)
    replace(where / "key", key.encode())
    state = open_state(where, tokens, hidden_size, statistics)
    assert state is not None
    return state


def _compress(job: Job, windows: Windows, state: State, progress: Progress) -> tuple[list[Row], list[str]]:
    """The walk, from wherever the state is; rows of fidelity and cost, and notes."""
    step = job.recipe.recipe.solver
    solve = method_of(step).step
    assert solve is not None
    smoothers: list[Smooth] = []
    for config in job.recipe.recipe.steps:
        smooth = method_of(config).smooth
        if smooth is not None:
            smoothers.append(lambda *found, smooth=smooth, config=config: smooth(*found, config))
    spec = WalkSpec(
        schemes=job.plan.schemes(), encode=job.format.encode, decode=job.format.decode,
        sequential=job.plan.sequential, dtype=calibration_dtype(), gram=job.plan.statistics == "gram",
        kv_cache=KV_CACHES.get(job.plan.kv_cache or ""),
    )  # fmt: skip
    tokens = (windows.tokens_NT, windows.heldout_NT)
    for block in walk(job.model, tokens, spec, state, lambda done, total: progress("blocks", done, total)):
        try:
            block.smoothers = tuple(smoothers)
            solve(block, block.schemes, step)
        except ValueError as error:  # a solver's refusal of the numbers
            raise CompressError(f"{step.method} cannot solve this block: {error}", where=block.name) from error
    head = job.model.head()
    found = compare_hidden(
        (head, head),
        lambda n: (state.base.read(n, n + 1), state.compressed.read(n, n + 1)),
        windows.heldout_NT,
    )
    rows = fidelity_rows(found, "heldout", {}, len(windows.heldout_NT))
    rows += [row("block_error", "pair", b["name"], b["error"], n=windows.heldout_NT.numel()) for b in state.blocks]
    rows += [
        row("compress_cpu_s", "artifact", "walk", state.cost["cpu_s"]),
        row("compress_wall_s", "artifact", "walk", state.cost["wall_s"]),
        row("compress_peak_bytes", "artifact", "walk", max(state.cost["peak_bytes"], memory.peak_rss_bytes())),
    ]
    notes = _smoothing_notes([b["smoothing"] for b in state.blocks if "smoothing" in b])
    notes += [f"{name}: {note}" for b in state.blocks for name, said in b["notes"].items() for note in said]
    return rows, notes


def _smoothing_notes(blocks: list[dict[str, Any]]) -> list[str]:
    """What was chosen for the inputs that smoothing looked at, and by its own measure what that gained."""
    found = [choice for block in blocks for choice in block.values()]
    if not found:
        return []
    chosen = ", ".join(f"{name} ({count})" for name, count in Counter(c["chosen"] for c in found).most_common(3))
    searched = [choice["loss"] / max(choice["without"], 1e-30) for choice in found if "loss" in choice]
    gain = f"; estimated output error {median(searched):.2f} of that without, in the median" if searched else ""
    return [f"smoothing chose scales for {len(found)} inputs, most often {chosen}{gain}"]


def _close(job: Job, windows: Windows, folder: Path, state: State) -> dict[str, Any]:
    """Writes the checkpoint and what was asked and done; the lock, not yet written."""
    artifact.remove_proof(folder)
    schemes = job.plan.schemes()
    ignore = [row.name for row in job.plan.rows if row.scheme is None]
    settings = job.format.config(schemes, ignore, KV_CACHES.get(job.plan.kv_cache or ""))
    about = (job.format, settings, job.source.name)
    artifact.assemble(folder, weights_folder(job.source), job.source.config, state, about, job.model)
    for name, document in (job.format.files(settings) if settings else {}).items():
        artifact.write_json(folder / name, document)
    replace(folder / "recipe.yaml", job.recipe.text.encode())
    artifact.write_json(folder / "plan.json", job.plan.document())
    return {
        "version": 1,
        "stages": {},
        "model": {
            "name": job.source.name, "repo": job.source.repo, "revision": job.source.revision,
            "kind": job.source.kind, "license": job.source.license,
            "weights_sha256": folder_digest(weights_folder(job.source)),
        },
        "recipe": job.recipe.recipe.document(), "changes": dict(job.recipe.changes),
        "data": {**data_document(job), "windows_sha256": windows.sha256, "counts": windows.counts},
        "settings": {
            "device": "cpu", "calibration_dtype": str(calibration_dtype()).removeprefix("torch."),
            "sequential": job.plan.sequential, "threads": torch.get_num_threads(), "trust_remote_code": False,
        },
        "versions": keys.versions(),
    }  # fmt: skip


def _bit_rows(job: Job) -> list[Row]:
    """Bits of the coded weights, and the cache of a token."""
    coded = [r for r in job.plan.rows if r.scheme]
    bits = 8 * sum(r.bytes_before for r in coded) / sum(r.shape[0] * r.shape[1] for r in coded)
    kv = job.plan.kv_bytes_per_token
    kv_after = kv // 2 if job.plan.kv_cache else kv
    return [
        row("bpw", "base", "checkpoint", bits),
        row("bpw", "artifact", "checkpoint", job.plan.bpw),
        row("kv_bytes_per_token", "base", "checkpoint", kv),
        row("kv_bytes_per_token", "artifact", "checkpoint", kv_after),
    ]


def _check_machine(plan: Plan, folder: Path) -> None:
    """Refuses what this machine's free memory and disk do not hold."""
    free = memory.available_memory_bytes()
    if plan.memory_bytes > free:
        raise CompressError(
            f"the run needs about {show_bytes(plan.memory_bytes)} of memory, and {show_bytes(free)} are free",
            where="this machine",
            hint="fewer calibration samples need less; or close other programs",
        )
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    disk = memory.free_disk_bytes(existing)
    if plan.disk_bytes - artifact.state_bytes(folder) > disk:
        raise CompressError(
            f"the run needs {show_bytes(plan.disk_bytes)} of disk, and {show_bytes(disk)} are free",
            where=str(folder),
            hint="free some, or choose another --out",
        )


def _identity(job: Job, folder: Path, notes: list[str]) -> dict[str, Any]:
    kinds = dict.fromkeys(row.scheme.text for row in job.plan.rows if row.scheme)
    if job.source.kind == "package":
        notes = ["the base was unpacked from a GGUF file of a package: its weights were rounded once already", *notes]
    return {
        "name": folder.name, "recipe": job.recipe.name, "method": [s.method for s in job.recipe.recipe.steps],
        "scheme": list(kinds), "format": job.format.name, "loaders": list(job.plan.loaders),
        "notes": [*job.plan.notes, *notes],
    }  # fmt: skip


def _base_identity(job: Job) -> dict[str, Any]:
    return {
        "name": job.source.repo or job.source.name, "revision": job.source.revision,
        "architecture": job.source.config.get("model_type"),
    }  # fmt: skip
