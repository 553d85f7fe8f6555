"""A job: a recipe resolved against a model and its data, before any weights are read; then with its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch

from compress import artifact
from compress.calibration.data import (
    ResolvedData,
    check_evaluation,
    check_length,
    check_positions,
    resolve_dataset,
)
from compress.errors import CompressError, nearest
from compress.evaluation.suite import Suite, load_suite
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.models.checkpoint import open_checkpoint
from compress.models.files import max_positions
from compress.models.load import Reader, StreamedModel, check_files, check_tensors, open_model, plain_reader
from compress.models.shapes import shapes_of
from compress.models.source import Source
from compress.models.source import resolve as resolve_model
from compress.plan import Plan, make_plan
from compress.recipe import RecipeFile, changed, load, needs_data
from compress.tables import resolve

DEVICES = ("auto", "cpu")


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
    params: int
    words: Any = None  # the tokenizer, where the model is a folder here


def prepare(recipe: str, model: str, *, changes: Mapping[str, Any] | None = None, evaluate: bool = True) -> Job:
    """Resolves recipe, model and data into a plan; no weights are read or downloaded, only a local folder's headers.

    Args:
        recipe: a shipped recipe's name, or a path.
        model: an alias, a hub id or a folder.
        changes: values in place of the recipe's, by dotted keys.
        evaluate: whether the suite's text must be there.
    """
    file = changed(load(recipe), changes or {})
    asked = file.recipe.evaluate.suite
    with file.located():
        chosen = load_suite(asked)
    source = resolve_model(model, weights=False)
    job = _job(file, source, chosen, _plain_model(source, _no_weights), data=None)
    if evaluate and not job.plan.refusals:
        text, where = chosen.text, f"suite {asked}, `text`"
        check_positions(text.seq_len, max_positions(source.config), where)
        check_evaluation(text.dataset, job.words, windows=text.windows, seq_len=text.seq_len, where=where)
    return job


def _plain_model(source: Source, reader: Reader | None) -> StreamedModel:
    return open_model(source.path or Path(), source.config, reader, where=str(source.path or source.name))


def _job(file: RecipeFile, source: Source, suite: Suite, model: StreamedModel, data: ResolvedData | None) -> Job:
    """The plan of a recipe for a model; `data` is what calibration resolved to already, None to resolve it."""
    if source.config.get("quantization_config"):
        method = source.config["quantization_config"].get("quant_method", "unknown")
        raise CompressError(
            f"the model is quantized already (quant_method: {method})",
            where=str(source.path or source.name),
            hint="give the original model",
        )
    words = check_files(model, source.path or Path()) if source.kind == "folder" else None
    shapes = shapes_of(model.skeleton, model.family, source.config)
    settings, data_used = file.recipe.calibration, needs_data(file.recipe)
    with file.located():
        data = data or (resolve_dataset(settings) if data_used else _no_data())
    fmt = resolve(FORMATS, file.recipe.format, kind="format")
    calibration = {
        "dataset": data.dataset, "asked": data.asked, "reason": data.reason, "seq_len": settings.seq_len,
        "tokens": settings.samples * settings.seq_len if data_used else 0,
        "heldout": heldout_windows(settings.samples if data_used else 0) * settings.seq_len,
    }  # fmt: skip
    plan = make_plan(
        file.recipe, shapes, model.family, fmt,
        names=(source.name, file.name), calibration=calibration, suite=suite.name,
    )  # fmt: skip
    if why := _obstacle(fmt, model, source):
        plan = replace_fields(plan, refusals=(*plan.refusals, why))
    if data_used and words is not None and not plan.refusals:
        with file.located():
            check_length(data, settings, words, heldout=heldout_windows(settings.samples), vocabulary=shapes.vocab_size)
    return Job(file, source, plan, data, suite, model, fmt, shapes.params, words)


def fetch(job: Job, name: str) -> Job:
    """The job with the model's weights here; planned again where its real config is not the one foreseen.

    Raises:
        CompressError: the plan refuses (before any weights are fetched), or the weights cannot be had.
    """
    refuse(job)
    source = resolve_model(name, weights=True)
    if source.config == job.source.config:
        reader = plain_reader(job.model.fit(open_checkpoint(weights_folder(source))))
        job = replace_fields(job, source=source, model=replace_fields(job.model, reader=reader))
    else:
        job = _job(job.recipe, source, job.suite, _plain_model(source, None), job.data)
        refuse(job)
    check_tensors(job.model, open_checkpoint(weights_folder(source)))
    why = _obstacle(job.format, job.model, source)
    if why is not None:
        raise CompressError(why, where=str(source.path), hint="choose another format")
    return job


def _obstacle(fmt: Format, model: StreamedModel, source: Source) -> str | None:
    """Why a format cannot hold a model; of its tokenizer only where the whole model is here."""
    here = source.kind == "folder" or (source.path is not None and (source.path / "tokenizer.json").is_file())
    why = fmt.refuses(model.resolved, source.path if here else None)
    return why and f"format {fmt.name} cannot hold this model: {why}"


def check_device(device: str) -> None:
    """Refuses a device that nothing here runs on yet."""
    if device not in DEVICES:
        raise CompressError(
            f"device {device!r} is not supported; {nearest(device, DEVICES)}", where="--device",
            hint="this version compresses and measures on the CPU; leave --device out",
        )  # fmt: skip


def refusal(job: Job) -> CompressError | None:
    """Why the plan cannot be carried out; None when it can."""
    if not job.plan.refusals:
        return None
    return CompressError(
        "; ".join(job.plan.refusals),
        where=f"{job.recipe.path} on {job.plan.model}",
        hint="change the recipe; `compress plan` shows what it means for every weight",
    )


def refuse(job: Job) -> None:
    """Raises what the plan refuses."""
    error = refusal(job)
    if error is not None:
        raise error


def heldout_windows(samples: int) -> int:
    """Windows held out beside so many for calibration: an eighth, at least 4 and at most 16."""
    return min(16, max(4, samples // 8))


def with_kept_data(job: Job, folder: Path) -> Job:
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


def data_document(job: Job) -> dict[str, Any]:
    settings = job.recipe.recipe.calibration.model_dump()
    return {
        "settings": settings, "asked": job.data.asked, "dataset": job.data.dataset, "reason": job.data.reason,
        "source_sha256": job.data.sha256,
    }  # fmt: skip


def _no_data() -> ResolvedData:
    return ResolvedData(dataset="embedded", asked="none", reason="the method needs no data", sha256=None)


def _no_weights(prefix: str) -> dict[str, torch.Tensor]:
    raise AssertionError(f"planning reads no weights, asked for {prefix}")


def weights_folder(source: Source) -> Path:
    assert source.path is not None, "weights were asked for"
    return source.path
