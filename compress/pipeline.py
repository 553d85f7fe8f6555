"""The whole product on one page: recipe, plan, walk, artifact, proof, measurements, report.

Every stage has a key, the hash of what it depends on; a stage whose key stands in the lock is not run again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from compress import artifact, keys
from compress.calibration.data import (
    ResolvedData,
    Windows,
    embedded_text,
    evaluation_windows,
    load_windows,
    resolve_dataset,
)
from compress.calibration.walk import State, WalkSpec, open_state, walk
from compress.errors import CompressError
from compress.evaluation import memory, report, speed
from compress.evaluation.fidelity import compare_hidden, fidelity_rows
from compress.evaluation.metrics import Row, row
from compress.evaluation.suite import Suite, load_suite
from compress.evaluation.worker import measure_fidelity
from compress.files import replace
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.models.digest import folder_digest
from compress.models.load import (
    Reader,
    StreamedModel,
    calibration_dtype,
    check_tensors,
    open_checkpoint,
    open_model,
    plain_reader,
    tokenizer,
)
from compress.models.shapes import shapes_of
from compress.models.source import Source
from compress.models.source import resolve as resolve_model
from compress.plan import Plan, make_plan
from compress.plan_text import plan_text
from compress.recipe import RecipeFile, load, method_of
from compress.runtimes.draw import draw
from compress.tables import resolve
from compress.verify import Request, verify

Progress = Callable[[str, int, int], None]  # what runs, how much is done, of how much


@dataclass(frozen=True)
class Job:
    """A recipe resolved against a model: everything that is known before weights are read."""

    recipe: RecipeFile
    source: Source
    plan: Plan
    data: ResolvedData
    suite: Suite
    model: StreamedModel
    format: Format


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the artifact's folder and its report."""

    folder: Path
    report: dict[str, Any]


def prepare(recipe: str, model: str, *, suite: str | None = None) -> Job:
    """Resolves recipe, model and data into a plan; no weights are read or downloaded.

    Args:
        recipe: a shipped recipe's name, or a path.
        model: an alias, a hub id or a folder.
        suite: in place of the recipe's.
    """
    file = load(recipe)
    chosen = load_suite(suite or file.recipe.evaluate.suite)
    source = resolve_model(model, weights=False)
    return _job(file, source, chosen, _plain_model(source, _no_weights))


def _plain_model(source: Source, reader: Reader | None) -> StreamedModel:
    return open_model(source.path or Path(), source.config, reader, where=str(source.path or source.name))


def _job(file: RecipeFile, source: Source, suite: Suite, model: StreamedModel) -> Job:
    if source.config.get("quantization_config"):
        method = source.config["quantization_config"].get("quant_method", "unknown")
        raise CompressError(
            f"the model is quantized already (quant_method: {method})",
            where=str(source.path or source.name),
            hint="give the original model",
        )
    settings = file.recipe.calibration
    needs_data = any(method_of(step).statistics for step in file.recipe.steps)
    data = resolve_dataset(settings) if needs_data else _no_data()
    fmt = resolve(FORMATS, file.recipe.format, kind="format")
    calibration = {
        "dataset": data.dataset, "asked": data.asked, "reason": data.reason, "seq_len": settings.seq_len,
        "tokens": settings.samples * settings.seq_len if needs_data else 0,
        "heldout": heldout_windows(settings.samples if needs_data else 0) * settings.seq_len,
    }  # fmt: skip
    plan = make_plan(
        file.recipe, shapes_of(model.skeleton, model.family, source.config), model.family, fmt,
        names=(source.name, file.name), calibration=calibration, suite=suite.name,
    )  # fmt: skip
    return Job(file, source, plan, data, suite, model, fmt)


def _fetch(job: Job, name: str) -> Job:
    """The job with the model's weights here; planned again where its real config is not the one foreseen.

    Raises:
        CompressError: the plan refuses (before any weights are fetched), or the weights cannot be had.
    """
    _refuse(job.plan)
    source = resolve_model(name, weights=True)
    if source.config == job.source.config:
        reader = plain_reader(open_checkpoint(_path(source)))
        job = replace_fields(job, source=source, model=replace_fields(job.model, reader=reader))
    else:
        job = _job(job.recipe, source, job.suite, _plain_model(source, None))
        _refuse(job.plan)
    check_tensors(job.model, open_checkpoint(_path(source)))
    return job


def _refuse(plan: Plan) -> None:
    if plan.refusals:
        raise CompressError("; ".join(plan.refusals), where=f"{plan.recipe} on {plan.model}")


def heldout_windows(samples: int) -> int:
    """Windows held out beside so many for calibration: an eighth, at least 4 and at most 16."""
    return min(16, max(4, samples // 8))


def run(
    recipe: str,
    model: str,
    out: Path | None,
    *,
    suite: str | None = None,
    evaluate: bool = True,
    progress: Progress,
) -> Outcome:
    """From a recipe and a model to a verified, measured artifact.

    Raises:
        CompressError: anything that a person can mend; nothing that was finished is lost.
    """
    memory.return_large_blocks()
    progress("model", 0, 1)
    job = prepare(recipe, model, suite=suite)
    folder = out or Path("artifacts") / f"{job.source.name}--{job.recipe.name}"
    artifact.check_folder(folder, job.source.path)
    job = _fetch(_with_kept_data(job, folder), model)
    key = keys.compress_key(job.recipe.recipe, job.plan, job.source, job.data)
    windows, tokens_NT = _tokens(job, folder, key, evaluate)
    memory.give_back()
    if windows is not None:
        _check_machine(job.plan, folder)
        with artifact.claimed(folder):
            if not _is_done(folder, key):  # another run may have ended meanwhile
                _make(job, windows, folder, key, progress)
    progress("model", 1, 1)
    document = report.read(folder)
    if tokens_NT is not None:
        with artifact.claimed(folder):
            document = _evaluate(job, tokens_NT, folder, document, progress)
    return Outcome(folder, document)


def _make(job: Job, windows: Windows, folder: Path, key: str, progress: Progress) -> None:
    """The verified artifact, and the report as far as making it tells."""
    state = _open(job, windows, folder, key)
    rows, notes = _compress(job, windows, state, progress)
    lock = _close(job, windows, folder, state)
    rows += _sizes(job, folder)
    progress("verify", 0, 1)
    request = Request(
        artifact=str(folder.resolve()), base=str(_path(job.source).resolve()), state=str(state.folder.resolve()),
        tokens=windows.heldout_NT.tolist(), whole=False, threads=torch.get_num_threads(),
    )  # fmt: skip
    try:
        found = verify(request)
    except CompressError:
        artifact.clear_state(folder)  # what it holds led to this: the next run begins anew
        raise
    progress("verify", 1, 1)
    document = report.build(
        artifact=_identity(job, folder, notes), base=_base_identity(job), verified=found, measurements=rows
    )
    lock["stages"] = {"compress": key}
    _publish(job, folder, document, lock)
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
    replace(where / "data.json", json.dumps(_data_document(job)).encode())
    _keep(windows, folder)
    replace(where / "key", key.encode())
    state = open_state(where, tokens, hidden_size, statistics)
    assert state is not None
    return state


def _compress(job: Job, windows: Windows, state: State, progress: Progress) -> tuple[list[Row], list[str]]:
    """The walk, from wherever the state is; rows of fidelity and cost, and notes."""
    step = job.recipe.recipe.solver
    method = method_of(step)
    spec = WalkSpec(
        schemes=job.plan.schemes(), encode=job.format.encode, decode=job.format.decode,
        sequential=job.plan.sequential, dtype=calibration_dtype(),
    )  # fmt: skip
    tokens = (windows.tokens_NT, windows.heldout_NT)
    for block in walk(job.model, tokens, spec, state, lambda done, total: progress("blocks", done, total)):
        try:
            method.step(block, block.schemes, step)
        except ValueError as error:  # a solver's refusal of the numbers
            raise CompressError(f"{step.method} cannot solve this block: {error}", where=block.name) from error
    head = job.model.head()
    found = compare_hidden(
        (head, head),
        lambda n: (state.base.read(n, n + 1), state.compressed.read(n, n + 1)),
        windows.heldout_NT,
    )
    state.commit()
    rows = fidelity_rows(found, "heldout", {})
    rows += [row("block_error", "pair", b["name"], b["error"], n=windows.heldout_NT.numel()) for b in state.blocks]
    rows += [
        row("compress_cpu_s", "artifact", "walk", state.cost["cpu_s"]),
        row("compress_wall_s", "artifact", "walk", state.cost["wall_s"]),
        row("compress_peak_bytes", "artifact", "walk", state.cost["peak_bytes"]),
    ]
    notes = [f"{name}: {note}" for b in state.blocks for name, said in b["notes"].items() for note in said]
    return rows, notes


def _close(job: Job, windows: Windows, folder: Path, state: State) -> dict[str, Any]:
    """Writes the checkpoint and what was asked and done; the lock, not yet written."""
    artifact.remove_proof(folder)
    schemes = job.plan.schemes()
    ignore = [row.name for row in job.plan.rows if row.scheme is None]
    artifact.assemble(folder, _path(job.source), job.source.config, state, job.format.config(schemes, ignore))
    replace(folder / "recipe.yaml", job.recipe.text.encode())
    artifact.write_json(folder / "plan.json", job.plan.document())
    return {
        "version": 1,
        "stages": {},
        "model": {
            "name": job.source.name, "repo": job.source.repo, "revision": job.source.revision,
            "kind": job.source.kind, "license": job.source.license,
            "weights_sha256": folder_digest(_path(job.source)),
        },
        "recipe": job.recipe.recipe.document(),
        "data": {**_data_document(job), "windows_sha256": windows.sha256, "counts": windows.counts},
        "settings": {
            "device": "cpu", "calibration_dtype": str(calibration_dtype()).removeprefix("torch."),
            "sequential": job.plan.sequential, "threads": torch.get_num_threads(), "trust_remote_code": False,
        },
        "versions": keys.versions(),
    }  # fmt: skip


def _evaluate(
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
            keys.stage_key([compress, points, torch.get_num_threads(), speed.cpu_name()], "evaluation/speed.py"),
            lambda: _speed(job, folder, document, progress),
        ),
    ]
    for name, key, stage in stages:
        lock = artifact.read_lock(folder)
        if lock["stages"].get(name) != key:
            document = stage()
            lock["stages"][name] = key
            _publish(job, folder, document, lock)
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
            artifact=str(folder.resolve()), base=str(_path(job.source).resolve()), state=None,
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
        _path(job.source), folder, tokens_NT.tolist(), task=job.suite.text.name, conditions=conditions,
        threads=torch.get_num_threads(), progress=lambda done, total: progress("fidelity", done, total),
    )  # fmt: skip
    made = {"heldout", "walk", "speed", "checkpoint"}  # the tasks of other stages' rows
    return _with_rows(document, rows, lambda r: r["task"] not in made and r["metric"] != "block_error")


def _sizes(job: Job, folder: Path) -> list[Row]:
    """Bytes and bits of base and artifact."""
    coded = [r for r in job.plan.rows if r.scheme]
    bits = 8 * sum(r.bytes_before for r in coded) / sum(r.shape[0] * r.shape[1] for r in coded)
    kv = job.plan.kv_bytes_per_token
    return [
        row("size_bytes", "base", "checkpoint", artifact.checkpoint_bytes(_path(job.source))),
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
        _path(job.source), folder, grid=[speed.Point(p.batch, p.context, p.output) for p in job.suite.speed],
        threads=torch.get_num_threads(), on_progress=lambda _, share: progress("speed", round(100 * share), 100),
    )  # fmt: skip
    return _with_rows(document, rows, lambda r: r["task"] == "speed")


def _with_note(document: dict[str, Any], note: str) -> dict[str, Any]:
    notes = [*document["artifact"]["notes"], note]
    return {**document, "artifact": {**document["artifact"], "notes": list(dict.fromkeys(notes))}}


def _with_rows(document: dict[str, Any], rows: list[Row], stale: Callable[[Row], bool]) -> dict[str, Any]:
    kept = [r for r in document["measurements"] if not stale(r)]
    return {**document, "measurements": kept + rows}


def _publish(job: Job, folder: Path, document: dict[str, Any], lock: dict[str, Any]) -> None:
    """Writes report, pages and card, and the lock last."""
    report.write(folder, document)
    text = plan_text(job.plan)
    replace(folder / "report.html", report.html(document, job.recipe.text, text).encode())
    card = report.card(document, job.recipe.name, job.recipe.text, job.source.license)
    replace(folder / "README.md", card.encode())
    skipped = {artifact.LOCK}
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in skipped)
    known = {n: d for n, d in lock.get("files", {}).items() if n.endswith(".safetensors")}  # written once
    lock["files"] = {p.name: known.get(p.name) or artifact.file_digest(p) for p in files}
    artifact.write_json(folder / artifact.LOCK, lock)


def _is_done(folder: Path, key: str) -> bool:
    """Whether the artifact of a key is there with a report that can be read."""
    try:
        return artifact.is_done(folder, key) and bool(report.read(folder))
    except CompressError:
        return False


def _tokens(job: Job, folder: Path, key: str, evaluate: bool) -> tuple[Windows | None, torch.Tensor | None]:
    """What the walk needs, None when it is done; the suite's windows [N, T], None without evaluation."""
    words = tokenizer(_path(job.source))
    tokens_NT = _suite_tokens(job, words) if evaluate else None
    windows = None if _is_done(folder, key) else _windows(job, words, folder, key)
    return windows, tokens_NT


def _suite_tokens(job: Job, words: Any) -> torch.Tensor:
    """The suite's windows [N, T], read before any work so that what is wrong with them is said then."""
    wanted = job.suite.text
    longest = int(job.source.config.get("max_position_embeddings") or wanted.seq_len)
    if wanted.seq_len > longest:
        raise CompressError(f"the suite's seq_len {wanted.seq_len} is longer than the model's {longest} positions")
    if wanted.dataset == "embedded":
        text = embedded_text("evaluation")
    else:
        path = Path(wanted.dataset.removeprefix("file:")).expanduser()
        if not wanted.dataset.startswith("file:") or not path.is_file():
            raise CompressError(f"the suite's text {wanted.dataset!r} is neither `embedded` nor `file:PATH` of a file")
        text = path.read_text(encoding="utf-8")
    return evaluation_windows(words, text, windows=wanted.windows, seq_len=wanted.seq_len)


def _windows(job: Job, words: Any, folder: Path, key: str) -> Windows:
    """Calibration and held-out tokens: those of the interrupted run of this key, else made now."""
    kept = folder / artifact.STATE / "windows.safetensors"
    if artifact.holds_state(folder, key) and kept.is_file():
        try:
            tensors, about = load_file(kept), json.loads((kept.with_suffix(".json")).read_text())
            return Windows(tensors["tokens"], tensors["heldout"], about["sha256"], about["counts"])
        except (OSError, ValueError, KeyError, SafetensorError):
            artifact.clear_state(folder)  # damaged: the run begins anew
    settings = job.recipe.recipe.calibration
    first = next((t for t in (words.bos_token_id, words.eos_token_id) if t is not None), 0)

    def generate(windows: int, seq_len: int, seed: int) -> torch.Tensor:
        return draw(_path(job.source).resolve(), first, windows, seq_len, seed, torch.get_num_threads())

    heldout = job.plan.calibration["heldout"] // settings.seq_len
    if job.plan.statistics == "none":
        settings = settings.model_copy(update={"samples": 1})
    return load_windows(job.data, settings, words, heldout=heldout, generate=generate)


def _keep(windows: Windows, folder: Path) -> None:
    """Keeps the tokens beside the state: text drawn from a model is not drawn twice."""
    path = folder / artifact.STATE / "windows.safetensors"
    replace(path, save({"tokens": windows.tokens_NT, "heldout": windows.heldout_NT}))
    about = {"sha256": windows.sha256, "counts": windows.counts}
    replace(path.with_suffix(".json"), json.dumps(about).encode())


def _data_document(job: Job) -> dict[str, Any]:
    settings = job.recipe.recipe.calibration.model_dump()
    return {
        "settings": settings, "asked": job.data.asked, "dataset": job.data.dataset, "reason": job.data.reason,
        "source_sha256": job.data.sha256,
    }  # fmt: skip


def _with_kept_data(job: Job, folder: Path) -> Job:
    """What `auto` resolved to when this artifact was begun or made is kept, not asked again."""
    begun = folder / artifact.STATE / "data.json"
    try:
        kept = json.loads(begun.read_bytes())
    except (OSError, ValueError):
        kept = artifact.read_lock(folder).get("data", {})
    settings = job.recipe.recipe.calibration
    if settings.dataset != "auto" or kept.get("settings") != settings.model_dump() or job.data.asked == "none":
        return job
    data = ResolvedData(kept["dataset"], kept["asked"], kept["reason"], kept["source_sha256"])
    calibration = {**job.plan.calibration, "dataset": data.dataset, "reason": data.reason}
    return replace_fields(job, data=data, plan=replace_fields(job.plan, calibration=calibration))


def _no_data() -> ResolvedData:
    return ResolvedData(dataset="embedded", asked="none", reason="the method needs no data", sha256=None)


def _no_weights(prefix: str) -> dict[str, torch.Tensor]:
    raise AssertionError(f"planning reads no weights, asked for {prefix}")


def _path(source: Source) -> Path:
    assert source.path is not None, "weights were asked for"
    return source.path


def _check_machine(plan: Plan, folder: Path) -> None:
    """Refuses what this machine's free memory and disk do not hold."""
    free = memory.available_memory_bytes()
    if plan.memory_bytes > free:
        raise CompressError(
            f"the run needs about {plan.memory_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
            hint="fewer calibration samples need less; or close other programs",
        )
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    disk = memory.free_disk_bytes(existing)
    if plan.disk_bytes - artifact.state_bytes(folder) > disk:
        raise CompressError(
            f"the run needs {plan.disk_bytes / 1e9:.1f} GB of disk, and {disk / 1e9:.1f} GB are free",
            where=str(folder),
            hint="free some, or choose another --out",
        )


def _identity(job: Job, folder: Path, notes: list[str]) -> dict[str, Any]:
    kinds = dict.fromkeys(row.scheme.text for row in job.plan.rows if row.scheme)
    if job.source.kind == "package":
        notes = ["the base was unpacked from a GGUF file of a package: its weights were rounded once already", *notes]
    return {
        "name": folder.name, "recipe": job.recipe.name, "method": [s.method for s in job.recipe.recipe.steps],
        "scheme": list(kinds), "format": job.format.name, "notes": [*job.plan.notes, *notes],
    }  # fmt: skip


def _base_identity(job: Job) -> dict[str, Any]:
    return {
        "name": job.source.repo or job.source.name, "revision": job.source.revision,
        "architecture": job.source.config.get("model_type"),
    }  # fmt: skip
