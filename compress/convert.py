"""`compress convert`: writes an artifact's codes in another format, without solving again.

The codes, scales and zero points that a solver found are read back from the checkpoint and written as the other format
lays them out, weight by weight. A conversion is made only where the weights that a loader will see stay the same, bit
by bit; what was measured of the artifact's quality still holds then, and its report keeps those rows. To `dense`,
values are rounded to bfloat16, and nothing is kept. What is not kept is measured anew by `compress eval`.

Left out: codes that would fit after a change of scales; solve again with the other format.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from compress import artifact
from compress.errors import CompressError
from compress.evaluation import report
from compress.evaluation.metrics import row
from compress.evaluation.rows import ACCURACY, LIKELIHOOD
from compress.files import replace
from compress.formats import FORMATS
from compress.formats.base import Format
from compress.measure import Progress, publish, size_rows
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.files import check_weights, read_config
from compress.models.load import StreamedModel, linears, open_model
from compress.pipeline import Outcome
from compress.plan import read_plan
from compress.schemes import Scheme
from compress.shards import StoredTensor, save_tensors, stored_tensors
from compress.tables import resolve

_ADDED_ONE = 2.0**-23  # what a float32 near one cannot hold: GGUF stores Gemma's norms with one added
_QUALITY = {spec.metric for spec in (*ACCURACY, *LIKELIHOOD)} | {"block_error", "kv_bytes_per_token"}


@dataclasses.dataclass(frozen=True)
class _Coded:
    """A checkpoint as it lies there: its model without weights, and how each of its weights is coded."""

    folder: Path
    config: dict[str, Any]
    model: StreamedModel
    checkpoint: Checkpoint
    format: Format
    schemes: Mapping[str, Scheme]

    def stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a linear layer."""
        return self.checkpoint.read(self.checkpoint.below(name))


def convert(source: Path, to: str, out: Path | None, progress: Progress) -> Outcome:
    """The same weights in another format, in a folder of their own.

    Args:
        source: an artifact, or any quantized checkpoint that is read here.
        to: a name of FORMATS.
        out: the new folder; by default beside `source`, with the format's name behind its own.

    Raises:
        CompressError: it is not quantized, the format cannot hold it, or weights would change.
    """
    target: Format = resolve(FORMATS, to, kind="format", where="--to")
    coded = _open(source)
    _refuse(coded, target)
    home = out or (source if source.name else source.resolve()).with_name(f"{source.resolve().name}-{target.name}")
    artifact.check_folder(home, source)
    lock = artifact.read_lock(home)
    if lock.get("stages") and "converted" not in lock:
        raise CompressError(
            "the folder holds an artifact that was not converted, which this would replace", where=str(home),
            hint="choose another --out",
        )  # fmt: skip
    with artifact.claimed(home):
        work = home / artifact.STATE
        artifact.clear_state(home)
        replace(work / "key", f"convert {target.name}".encode())
        try:
            tensors = _recoded(coded, target, work, progress)
        except CompressError:
            artifact.remove_state(home)  # what stood here before still stands
            raise
        artifact.remove_proof(home)
        _write(coded, target, home, tensors)
        found = _verify(coded, target, home, progress)
        document = _publish(coded, target, home, found)
        artifact.remove_state(home)
    return Outcome(home, document)


def _open(folder: Path) -> _Coded:
    config = read_config(folder)
    check_weights(folder)
    model = open_model(folder, config)
    fmt, schemes = artifact.read_schemes(config, [name for name, _, _ in linears(model.skeleton)])
    if fmt is None:
        raise CompressError(
            "its weights are not coded, so there is nothing to write in another format", where=str(folder),
            hint="compress it: compress run RECIPE --model FOLDER --format FORMAT",
        )  # fmt: skip
    changed = artifact.altered(folder) if artifact.read_lock(folder) else []
    if changed:
        raise CompressError(
            f"{', '.join(changed)} changed since the artifact was verified", where=str(folder),
            hint="run its recipe again: it makes anew what is missing",
        )  # fmt: skip
    checkpoint = model.fit(open_checkpoint(folder))
    artifact.check_claims(checkpoint, fmt, schemes)
    _check_whole(model, checkpoint, fmt, schemes)
    return _Coded(folder, config, model, checkpoint, fmt, schemes)


def _check_whole(model: StreamedModel, checkpoint: Checkpoint, fmt: Format, schemes: Mapping[str, Scheme]) -> None:
    """Refuses a checkpoint that lacks a tensor of the model that its config describes."""
    expected = set(model.skeleton.state_dict())
    if model.skeleton.config.tie_word_embeddings:  # type: ignore[union-attr]
        expected.discard(f"{model.family.head}.weight")
    coded = {f"{name}.{part}" for name in schemes for part in fmt.parts} & set(checkpoint.files)
    absent = sorted(expected - set(checkpoint.files) - {f"{name.rpartition('.')[0]}.weight" for name in coded})
    if absent:
        raise CompressError(
            f"{len(absent)} tensors of the model are not there, {absent[0]} first", where=str(checkpoint.folder),
            hint="check that config.json and the weights belong together, and are whole",
        )  # fmt: skip


def _refuse(coded: _Coded, target: Format) -> None:
    """Refuses what the format has no words for.

    Raises:
        CompressError: with the formats that would do.
    """
    if target.name == coded.format.name:
        raise CompressError(
            f"it is in the format {target.name} already", where=str(coded.folder),
            hint=f"name another: {', '.join(name for name in FORMATS if name != target.name)}",
        )  # fmt: skip
    why = _obstacle(coded, target)
    if why is None:
        return
    others: dict[str, Format] = {name: resolve(FORMATS, name, kind="format") for name in FORMATS}
    able = [n for n, other in others.items() if n != coded.format.name and _obstacle(coded, other) is None]
    raise CompressError(
        f"format {target.name} cannot hold it: {why}", where=str(coded.folder),
        hint=f"formats that can: {', '.join(able) or 'none but its own'}",
    )  # fmt: skip


def _obstacle(coded: _Coded, target: Format) -> str | None:
    kinds = list(dict.fromkeys(coded.schemes.values()))
    reasons = [target.can_mix(kinds), *(target.can_write(kind, coded.model.family.model_type) for kind in kinds)]
    if coded.format.read_cache(coded.config["quantization_config"]) is not None and not target.holds_cache:
        reasons.append("it has no words for a quantized cache")
    outside = [name for name in coded.schemes if not name.startswith(f"{coded.model.family.blocks}.")]
    if outside and target.name in ("gptq", "awq", "gguf"):
        reasons.append(f"it holds coded weights in blocks only, not {outside[0]}")
    if coded.model.transposed and not target.transposed:
        reasons.append("its loaders leave transposed layers (Conv1D) alone")
    reasons.append(target.refuses(coded.model.resolved, coded.folder))
    shapes = {name: shape for name, shape, _ in linears(coded.model.skeleton)}
    reasons += [f"{name}: {why}" for name in coded.schemes if (why := target.misfit(shapes[name]))]
    return next(filter(None, reasons), None)


def _recoded(coded: _Coded, target: Format, work: Path, progress: Progress) -> list[StoredTensor]:
    """Every tensor of the new checkpoint: what was coded in the new format, everything else as it was."""
    replaced = {f"{name}.{part}" for name in coded.schemes for part in coded.format.parts}
    tensors = _others(coded, replaced, work)
    for i, (name, scheme) in enumerate(coded.schemes.items()):
        tensors += _recode(coded, target, name, scheme, work / f"{i:05d}.safetensors")
        progress("convert", i + 1, len(coded.schemes))
    return tensors


def _write(coded: _Coded, target: Format, home: Path, tensors: list[StoredTensor]) -> None:
    """The checkpoint's files."""
    ignore = [name for name, _, _ in linears(coded.model.skeleton) if name not in coded.schemes]
    settings = target.config(coded.schemes, ignore, coded.format.read_cache(coded.config["quantization_config"]))
    artifact.write_config(home, coded.config, settings)
    artifact.write_tensors(home, tensors, (target, coded.folder, _model_name(coded)), coded.model)
    for name, content in (target.files(settings) if settings else {}).items():
        artifact.write_json(home / name, content)
    artifact.copy_sidecars(coded.folder, home)
    for file in ("recipe.yaml", "plan.json"):
        (home / file).unlink(missing_ok=True)  # of an earlier conversion
        if (coded.folder / file).is_file():
            shutil.copyfile(coded.folder / file, home / file)
    recipe = home / "recipe.yaml"
    if recipe.is_file():  # it asks for this format now
        document = {**yaml.safe_load(recipe.read_text(encoding="utf-8")), "format": target.name}
        replace(recipe, yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode())


def _model_name(coded: _Coded) -> str:
    """The name of the model that was compressed, as far as it is known."""
    return str(artifact.read_lock(coded.folder).get("model", {}).get("name") or coded.folder.name)


def _others(coded: _Coded, replaced: set[str], work: Path) -> list[StoredTensor]:
    """What is not coded anew, by the modules' names; what lies in another kind of file is copied out of it first."""
    files = sorted({coded.folder / file for file in coded.checkpoint.files.values()})
    if coded.format.close is not None:
        files, dtype = [], getattr(torch, str(coded.config.get("dtype") or "float32").removeprefix("torch."))
        for i, name in enumerate(sorted(set(coded.checkpoint.files) - replaced)):
            files.append(work / f"other-{i:05d}.safetensors")
            value = coded.checkpoint.read([name])[name]
            save_tensors({name: value.to(dtype) if value.dtype == torch.float32 else value}, files[-1])
    names = coded.model.family.module_tensors([t.name for file in files for t in stored_tensors(file)])
    stored = [replace_fields(t, name=names[t.name]) for file in files for t in stored_tensors(file)]
    return [tensor for tensor in stored if tensor.name not in replaced]


def _recode(coded: _Coded, target: Format, name: str, scheme: Scheme, path: Path) -> list[StoredTensor]:
    """A weight's tensors in the new format, in a file of their own.

    Raises:
        CompressError: the weight would change.
    """
    stored = coded.stored(name)
    weight = coded.format.read(name, stored, scheme)
    assert weight is not None, "a coded checkpoint holds codes"
    wanted_OI = coded.format.decode(name, stored, scheme)
    tensors = target.encode(name, weight, scheme) if target.packs else {f"{name}.weight": wanted_OI.bfloat16()}
    if not torch.equal(target.decode(name, tensors, scheme), _kept(wanted_OI, target)):
        raise CompressError(
            f"format {target.name} would change a weight: its scales or codes do not fit", where=name,
            hint=f"solve again: compress run RECIPE --model MODEL --format {target.name}",
        )  # fmt: skip
    save_tensors({n: t.t().contiguous() if n in coded.model.transposed else t for n, t in tensors.items()}, path)
    return stored_tensors(path)


def _kept(weight_OI: Tensor, target: Format) -> Tensor:
    """What of a weight a format keeps: all of it, or without codes its value in bfloat16."""
    return weight_OI if target.packs else weight_OI.bfloat16().float()


def _verify(coded: _Coded, target: Format, home: Path, progress: Progress) -> dict[str, Any]:
    """Reopens the new checkpoint and compares every tensor with the old one's."""
    old, new = artifact.open_artifact(coded.folder), artifact.open_artifact(home)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in coded.checkpoint.files))
    for i, module in enumerate(modules):
        theirs, ours = (model.reader(module) for model in (new, old))
        for name in (name for name in ours if name in theirs or not name.endswith(old.ignored)):
            coded_one = module in coded.schemes and name == f"{module}.weight"
            wanted = _kept(ours[name], target) if coded_one else ours[name].float()
            if not torch.allclose(theirs[name].float(), wanted, rtol=0, atol=0 if coded_one else _ADDED_ONE):
                raise CompressError("the new checkpoint does not give the same weight", where=name)
        progress("verify", i + 1, len(modules))
    return {"blocks": old.block_count, "max_error": 0.0, "tensors": len(open_checkpoint(home).files)}


def _publish(coded: _Coded, target: Format, home: Path, verified: dict[str, Any]) -> dict[str, Any]:
    """Report, pages, card and lock: of what was known of the old artifact that which still holds."""
    lock = artifact.read_lock(coded.folder)
    old = report.read(coded.folder) if "compress" in lock.get("stages", {}) else None
    kinds = dict.fromkeys(coded.schemes.values())
    family = coded.model.family.model_type
    stale = {coded.format.caveat(kind, family) for kind in kinds}
    caveats = [c for kind in kinds if (c := target.caveat(kind, family))]
    what = "the same weights" if target.packs else "the same weights, rounded to bfloat16"
    told = [note for note in (old["artifact"].get("notes") or [] if old else []) if note not in stale]
    bits = _bits(coded, target)
    _keep_plan(target, home, bits, [*told, *caveats])
    kept = [r for r in (old["measurements"] if old else []) if _holds(r, target)]
    about = dict(old["artifact"]) if old else {"scheme": [kind.text for kind in kinds]}
    about |= {
        "name": home.name, "format": target.name, "loaders": list(target.read_by(kinds)),
        "notes": [f"converted from the format {coded.format.name}: {what}", *told, *dict.fromkeys(caveats)],
    }  # fmt: skip
    document = report.build(
        artifact=about, base=old["base"] if old else {"name": None}, verified=verified,
        verdict=old["verdict"] if old and target.packs else None,
        measurements=[*kept, *size_rows(home, None), row("bpw", "artifact", "checkpoint", bits)],
    )  # fmt: skip
    made = artifact.digest([lock.get("stages"), target.name])
    lock = {**lock, "version": 1, "stages": {"compress": made}, "converted": coded.format.name}
    lock.pop("files", None)
    lock.setdefault("model", {"name": coded.folder.name, "kind": "folder", "license": None})
    lock.setdefault("recipe", {})
    return publish(home, document, lock, charts=False)


def _holds(measured: Mapping[str, Any], target: Format) -> bool:
    """Whether a row of the old report says something of the new artifact, or of the base."""
    return measured["subject"] == "base" or (target.packs and measured["metric"] in _QUALITY)


def _keep_plan(target: Format, home: Path, bits: float, notes: list[str]) -> None:
    """plan.json as it would be in the new format, where the source had one."""
    plan = read_plan(home)
    if plan is None:
        return
    sizes = [target.weight_bytes(r.scheme, r.shape) if r.scheme else r.bytes_after for r in plan.rows]
    rows = tuple(dataclasses.replace(r, bytes_after=size) for r, size in zip(plan.rows, sizes, strict=True))
    saved = sum(r.bytes_before - r.bytes_after for r in rows)
    loaders = target.read_by({r.scheme for r in rows if r.scheme})
    plan = dataclasses.replace(
        plan, format=target.name, loaders=loaders, rows=rows, bytes_after=plan.bytes_before - saved, bpw=bits,
        notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip
    artifact.write_json(home / "plan.json", plan.document())


def _bits(coded: _Coded, target: Format) -> float:
    """Bits of a coded weight, scales and all."""
    shapes = {name: shape for name, shape, _ in linears(coded.model.skeleton)}
    found = [(target.weight_bytes(scheme, shapes[name]), shapes[name]) for name, scheme in coded.schemes.items()]
    return 8 * sum(size for size, _ in found) / sum(rows * columns for _, (rows, columns) in found)
