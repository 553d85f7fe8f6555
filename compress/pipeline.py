"""The whole product on one page: recipe, plan, walk, artifact, proof, measurements, report.

Every stage has a key, the hash of what it depends on; a stage whose key stands in the lock is not run again.
"""

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch

from compress import artifact
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
from compress.models.load import (
    Reader,
    StreamedModel,
    calibration_dtype,
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
    settings = file.recipe.calibration
    needs_data = any(method_of(step).statistics for step in file.recipe.steps)
    data = resolve_dataset(settings) if needs_data else _no_data()
    fmt = resolve(FORMATS, file.recipe.format, kind="format")
    calibration = {
        "dataset": data.dataset, "asked": data.asked, "reason": data.reason, "seq_len": settings.seq_len,
        "tokens": settings.samples * settings.seq_len if needs_data else 0,
        "heldout": heldout_windows(settings.samples) * settings.seq_len,
    }  # fmt: skip
    plan = make_plan(
        file.recipe, shapes_of(model.skeleton, model.family, source.config), model.family, fmt,
        names=(source.name, file.name), calibration=calibration,
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
        return replace_fields(job, source=source, model=replace_fields(job.model, reader=reader))
    job = _job(job.recipe, source, job.suite, _plain_model(source, None))
    _refuse(job.plan)
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
    progress("model", 0, 1)
    job = _fetch(prepare(recipe, model, suite=suite), model)
    folder = out or Path("artifacts") / f"{job.source.name}--{job.recipe.name}"
    artifact.check_folder(folder)
    words = tokenizer(_path(job.source))
    windows = _windows(job, words)
    _check_machine(job.plan, folder)
    with artifact.claimed(folder):
        key = _compress_key(job, windows)
        lock = artifact.read_lock(folder)
        if lock.get("stages", {}).get("compress") != key:
            rows, state, notes = _compress(job, windows, folder, key, progress)
            lock = _close(job, windows, folder, state, key)
            found = _verify(job, windows, folder, evaluate, progress)
            document = report.build(
                artifact=_identity(job, folder, notes), base=_base_identity(job), verified=found,
                measurements=rows,
            )  # fmt: skip
            lock["stages"] = {"compress": key, "verify": key}
            _publish(job, folder, document, lock)
            artifact.remove_state(folder)
        document = report.read(folder)
        if evaluate:
            document = _evaluate(job, words, folder, document, lock, progress)
    return Outcome(folder, document)


def _compress(
    job: Job, windows: Windows, folder: Path, key: str, progress: Progress
) -> tuple[list[Row], State, list[str]]:
    """The walk, from wherever an earlier run of the same key got; rows of fidelity and cost."""
    state_folder = folder / artifact.STATE
    stamp = state_folder / "key"
    if not stamp.is_file() or stamp.read_text() != key:
        for path in state_folder.iterdir():
            if path.name != "claim":
                path.unlink()
        replace(stamp, key.encode())
    step = next(s for s in job.recipe.recipe.steps if method_of(s).kind == "block")
    method = method_of(step)
    spec = WalkSpec(
        schemes=job.plan.schemes(), encode=job.format.encode, decode=job.format.decode,
        statistics=method.statistics is not None, sequential=job.plan.sequential, dtype=calibration_dtype(),
    )  # fmt: skip
    tokens = (windows.tokens_NT, windows.heldout_NT)
    hidden_size = int(job.model.skeleton.config.hidden_size)  # type: ignore[arg-type, union-attr]
    state = open_state(state_folder, tokens, hidden_size, spec.statistics)
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
    return rows, state, notes


def _close(job: Job, windows: Windows, folder: Path, state: State, key: str) -> dict[str, Any]:
    """Writes the checkpoint and what was asked and done; the lock, not yet written."""
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
            "kind": job.source.kind, "license": job.source.license, "weights_sha256": _weights_key(job.source),
        },
        "recipe": job.recipe.recipe.document(),
        "data": {
            "asked": job.data.asked, "dataset": job.data.dataset, "reason": job.data.reason,
            "source_sha256": job.data.sha256, "windows_sha256": windows.sha256, "counts": windows.counts,
        },
        "settings": {
            "device": "cpu", "calibration_dtype": str(calibration_dtype()).removeprefix("torch."),
            "sequential": job.plan.sequential, "threads": torch.get_num_threads(),
            "trust_remote_code": False, "key": key,
        },
        "versions": _versions(),
    }  # fmt: skip


def _verify(job: Job, windows: Windows, folder: Path, whole: bool, progress: Progress) -> dict[str, Any]:
    """Proof in a fresh process; whole reload when the float32 model takes under half the free memory."""
    progress("verify", 0, 1)
    fits = 2 * job.plan.bytes_before < memory.available_memory_bytes() // 2
    finding = verify(
        Request(
            artifact=str(folder.resolve()), base=str(_path(job.source).resolve()),
            state=str((folder / artifact.STATE).resolve()), tokens=windows.heldout_NT.tolist(),
            whole=whole and fits, threads=torch.get_num_threads(),
        )
    )  # fmt: skip
    progress("verify", 1, 1)
    return finding


def _evaluate(
    job: Job, words: Any, folder: Path, document: dict[str, Any], lock: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """The suite, for artifact and base; each part is published as it ends."""
    suite = job.suite
    base = _path(job.source)
    tokens_NT = _suite_tokens(suite, words)
    conditions = {
        "runtime": "stream", "dtype": "float32", "seq_len": suite.text.seq_len,
        "data": artifact.digest(tokens_NT.tolist())[:16],
    }  # fmt: skip
    key = artifact.digest([lock["stages"]["compress"], suite.text.model_dump(), conditions])
    if lock["stages"].get("fidelity") != key:
        rows = [
            row("size_bytes", "base", "checkpoint", artifact.checkpoint_bytes(base)),
            row("size_bytes", "artifact", "checkpoint", artifact.checkpoint_bytes(folder)),
            row("bpw", "base", "checkpoint", 16.0),
            row("bpw", "artifact", "checkpoint", job.plan.bpw),
            row("kv_bytes_per_token", "base", "checkpoint", job.plan.kv_bytes_per_token),
            row("kv_bytes_per_token", "artifact", "checkpoint", job.plan.kv_bytes_per_token),
        ]
        rows += measure_fidelity(
            base.resolve(), folder.resolve(), tokens_NT.tolist(), task=suite.text.dataset, conditions=conditions,
            threads=torch.get_num_threads(), progress=lambda done, total: progress("fidelity", done, total),
        )  # fmt: skip
        document = _with_rows(document, rows, lambda r: r["task"] in ("checkpoint", suite.text.dataset))
        lock["stages"]["fidelity"] = key
        _publish(job, folder, document, lock)
    speed_key = artifact.digest([key, [p.model_dump() for p in suite.speed], torch.get_num_threads()])
    if suite.speed and lock["stages"].get("speed") != speed_key:
        grid = [speed.Point(p.batch, p.context, p.output) for p in suite.speed]
        rows = speed.measure(
            base, folder, grid=grid, threads=torch.get_num_threads(),
            on_progress=lambda _, share: progress("speed", round(100 * share), 100),
        )  # fmt: skip
        document = _with_rows(document, rows, lambda r: r["task"] == "speed")
        lock["stages"]["speed"] = speed_key
        _publish(job, folder, document, lock)
    return document


def _with_rows(document: dict[str, Any], rows: list[Row], stale: Callable[[Row], bool]) -> dict[str, Any]:
    kept = [r for r in document["measurements"] if not stale(r)]
    return {**document, "measurements": kept + rows}


def _publish(job: Job, folder: Path, document: dict[str, Any], lock: dict[str, Any]) -> None:
    """Writes report, pages and card, and the lock last."""
    report.write(folder, document)
    text = plan_text(job.plan)
    report.write_text(folder / "report.html", report.html(document, job.recipe.text, text))
    report.write_text(folder / "README.md", report.card(document, job.recipe.name, job.recipe.text, job.source.license))
    skipped = {artifact.LOCK}
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in skipped)
    lock["files"] = {p.name: artifact.file_digest(p) for p in files}
    artifact.write_json(folder / artifact.LOCK, lock)


def _suite_tokens(suite: Suite, words: Any) -> torch.Tensor:
    if suite.text.dataset == "embedded":
        text = embedded_text("evaluation")
    else:
        path = Path(suite.text.dataset.removeprefix("file:")).expanduser()
        if not suite.text.dataset.startswith("file:") or not path.is_file():
            raise CompressError(f"the suite's text {suite.text.dataset!r} is neither `embedded` nor `file:PATH`")
        text = path.read_text(encoding="utf-8")
    return evaluation_windows(words, text, windows=suite.text.windows, seq_len=suite.text.seq_len)


def _windows(job: Job, words: Any) -> Windows:
    """Calibration and held-out tokens; data-free methods take the embedded text's for the held-out part."""
    settings = job.recipe.recipe.calibration
    first = next((t for t in (words.bos_token_id, words.eos_token_id) if t is not None), 0)

    def generate(windows: int, seq_len: int, seed: int) -> torch.Tensor:
        return draw(_path(job.source).resolve(), first, windows, seq_len, seed, torch.get_num_threads())

    heldout = heldout_windows(settings.samples)
    if job.plan.statistics == "none":
        settings = settings.model_copy(update={"samples": 1})
    return load_windows(job.data, settings, words, heldout=heldout, generate=generate)


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
    if plan.disk_bytes > disk:
        raise CompressError(
            f"the run needs {plan.disk_bytes / 1e9:.1f} GB of disk, and {disk / 1e9:.1f} GB are free",
            where=str(folder),
            hint="free some, or choose another --out",
        )


def _compress_key(job: Job, windows: Windows) -> str:
    package = Path(__file__).parent
    sources = [
        "numerics.py",
        "schemes.py",
        "shards.py",
        "artifact.py",
        "calibration",
        "methods",
        "formats",
        "models",
    ]
    files = sorted(f for s in sources for f in ([package / s] if s.endswith(".py") else (package / s).glob("*.py")))
    recipe = job.recipe.recipe.document()
    recipe.pop("evaluate")
    recipe.pop("summary")
    return artifact.digest(
        {
            "recipe": recipe, "plan": job.plan.document()["rows"], "sequential": job.plan.sequential,
            "weights": _weights_key(job.source), "config": job.source.config, "windows": windows.sha256,
            "dtype": str(calibration_dtype()), "source": [artifact.file_digest(f) for f in files],
            "torch": torch.__version__,
        }
    )  # fmt: skip


def _weights_key(source: Source) -> str:
    """sha256 over the weight files' names and bytes, remembered beside the cache by size and time."""
    from compress.models.digest import folder_digest

    return folder_digest(_path(source))


def _identity(job: Job, folder: Path, notes: list[str]) -> dict[str, Any]:
    kinds = dict.fromkeys(row.scheme.text for row in job.plan.rows if row.scheme)
    return {
        "name": folder.name, "recipe": job.recipe.name, "method": [s.method for s in job.recipe.recipe.steps],
        "scheme": list(kinds), "format": job.format.name, "notes": [*job.plan.notes, *notes],
    }  # fmt: skip


def _base_identity(job: Job) -> dict[str, Any]:
    return {
        "name": job.source.repo or job.source.name, "revision": job.source.revision,
        "architecture": job.source.config.get("model_type"),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    names = ("compress", "torch", "transformers", "compressed-tensors", "safetensors", "tokenizers")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "source"
    return found
