"""`compress eval`: measures a checkpoint that is there already, an artifact of ours or any that transformers loads.

An artifact is compared with the model that it was made from, and its own report is brought up to date. Anything
else gets a report in a folder of its own, compared with a model where one is named. A GGUF file of another tool is
measured as `decoded` reads it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress import artifact, decoded, keys, measure
from compress.errors import CompressError
from compress.evaluation import report
from compress.evaluation.metrics import Row, row
from compress.evaluation.suite import Suite, load_suite
from compress.files import joined_name
from compress.formats import gguf_values
from compress.job import check_device, weights_folder
from compress.models.digest import folder_digest
from compress.models.source import Source
from compress.models.source import resolve as resolve_model
from compress.models.words import tokenizer
from compress.pipeline import Outcome
from compress.recipe import Evaluate
from compress.windows import suite_tokens


@dataclass(frozen=True)
class Terms:
    """On which terms a checkpoint is judged: by which suite, and the difference in accuracy that still counts."""

    suite: Suite
    delta: float


def judge(
    target: str,
    *,
    suite: str | None = None,
    against: str | None = None,
    out: Path | None = None,
    device: str = "auto",
    others: Terms | None = None,
    progress: measure.Progress,
) -> Outcome:
    """Measures a checkpoint; its report.

    Args:
        target: an artifact's folder, a model as `--model` takes it, or a GGUF file of any tool, with `against`.
        suite: a name or a file; by default the artifact's recipe's, or that of `others`.
        against: the model to compare with; an artifact's default is its own base.
        out: the folder of report and lock; by default the artifact's own, else `evaluations/<name>`.
        others: the terms of what is no artifact of ours; by default the suite "embedded", and one point.

    Raises:
        CompressError: anything that a person can mend.
    """
    check_device(device)
    folder = Path(target).expanduser()
    lock = artifact.read_lock(folder)
    ours = is_ours(lock)
    _check_artifact(folder, ours)
    terms = terms_of(lock, suite, folder) if ours or others is None else others
    chosen = terms.suite
    named = (str(folder.resolve()) if ours else target, against or (base_name(lock) if ours else None))
    find(*named)
    source, base = _with_weights(*named, progress)
    if source.file is not None:
        chosen = chosen.model_copy(update={"speed": ()})
    tokens_NT = _tokens(source, base, chosen)
    own = ours and base is not None and folder_digest(weights_folder(base)) == lock["model"].get("weights_sha256")
    if ours and not own and against is None:
        raise CompressError(
            "the base is not the model that the artifact was made from: its weights differ",
            where=lock["model"]["name"], hint="name the right one by --against",
        )  # fmt: skip
    own = own and (out is None or out.resolve() == folder.resolve())
    home = folder if own else out or _default_home(source, base)
    if not own:
        _check_home(home, source, base)
    asked = measure.Evaluation(
        home=home, artifact=weights_folder(source), base=weights_folder(base) if base else None, suite=chosen,
        tokens_NT=tokens_NT, delta=terms.delta,
        made=lock["stages"]["compress"] if own else keys.checkpoint_key(weights_folder(source)), ours=own,
    )  # fmt: skip
    measure.check(asked)
    with artifact.claimed(home):
        if not own:
            _begin(asked, source, base)
        document = measure.evaluate(asked, report.read(home), progress)
    return Outcome(home, document)


def is_ours(lock: dict[str, Any]) -> bool:
    """Whether a lock is of an artifact that was made here."""
    return "compress" in lock.get("stages", {})


def terms_of(lock: dict[str, Any], suite: str | None, where: Path) -> Terms:
    """The terms of an artifact, or of anything else, whose lock is empty: as its recipe says, by a suite where named.

    Raises:
        CompressError: no such suite; a lock of which this version does not know the words.
    """
    try:
        settings = Evaluate(**lock.get("recipe", {}).get("evaluate", {}))
        known = Suite(**lock["suite"]) if suite is None and lock.get("suite") else None
    except (TypeError, ValueError) as error:
        raise CompressError(
            "the artifact's lock.json says how to evaluate it in words that are not known here",
            where=str(where / artifact.LOCK), hint="name a suite by --suite, or run its recipe again",
        ) from error  # fmt: skip
    return Terms(known or load_suite(suite or settings.suite), settings.delta)


def find(target: str, against: str | None) -> None:
    """Refuses names that cannot be judged, before anything is fetched.

    Raises:
        CompressError: there is no such model; a GGUF file without a base, or not of it.
    """
    file = decoded.gguf_file_of(target)
    if file is None:
        resolve_model(target, weights=False)
    elif against is None:
        raise CompressError(
            "a GGUF file is measured beside the model that it was made from, whose tokenizer is used for both",
            where=target, hint="name it: --against BASE",
        )  # fmt: skip
    base = resolve_model(against, weights=False) if against else None
    if file is not None and base is not None:
        decoded.check(file, base)


def _with_weights(target: str, against: str | None, progress: measure.Progress) -> tuple[Source, Source | None]:
    """What is measured, and the base."""
    file = decoded.gguf_file_of(target)
    base = resolve_model(against, weights=True) if against else None
    if file is None:
        return resolve_model(target, weights=True), base
    assert base is not None, "a GGUF file was found, beside its base"
    return decoded.decoded(file, base, progress), base


def _default_home(source: Source, base: Source | None) -> Path:
    """`evaluations/<names>`; of another checkpoint that is called the same, with a hash of its weights."""
    names = [model.name for model in (source, base) if model]
    home, weights = Path("evaluations") / joined_name(names), folder_digest(weights_folder(source))
    before = artifact.read_lock(home).get("model", {}).get("weights_sha256", weights)
    return home if before == weights else Path("evaluations") / joined_name([f"{names[0]}-{weights[:8]}", *names[1:]])


def _check_artifact(folder: Path, ours: bool) -> None:
    """Refuses an artifact whose lock, report or weights are not what was verified.

    Raises:
        CompressError: what is damaged.
    """
    remedy = "run its recipe again: it makes anew what is missing"
    if not ours and all((folder / name).is_file() for name in ("plan.json", "recipe.yaml")):
        raise CompressError("the artifact's lock.json is missing or damaged", where=str(folder), hint=remedy)
    if ours and not (folder / report.FILE).is_file():
        raise CompressError("the artifact has no report.json", where=str(folder), hint=remedy)
    changed = artifact.altered(folder) if ours else []
    if changed:
        raise CompressError(
            f"{', '.join(changed)} changed since the artifact was verified", where=str(folder), hint=remedy
        )


def _check_home(home: Path, source: Source, base: Source | None) -> None:
    """Refuses to report into a model's folder or into an artifact, whose own report and proof would be lost.

    Raises:
        CompressError: it is one of them, or holds something else.
    """
    for model in (source, base):
        artifact.check_folder(home, model.path if model else None)
    if is_ours(artifact.read_lock(home)):
        raise CompressError(
            "the folder holds an artifact, whose own report this would replace", where=str(home),
            hint="choose another --out, or leave it out",
        )  # fmt: skip
    before = artifact.read_lock(home).get("model", {}).get("weights_sha256")
    if before is not None and before != folder_digest(weights_folder(source)):
        raise CompressError(
            "the folder holds the report of another model of this name", where=str(home), hint="choose another --out"
        )


def base_name(lock: dict[str, Any]) -> str:
    """The model that an artifact was made from, as `--model` takes it."""
    model = lock["model"]
    if model["kind"] == "folder":
        raise CompressError(
            f"the artifact was made from a folder, {model['name']!r}, which is not known here",
            where="the base", hint="name it: --against FOLDER",
        )  # fmt: skip
    return f"{model['repo']}@{model['revision']}" if model["kind"] == "hub" else str(model["name"])


def _tokens(source: Source, base: Source | None, suite: Any) -> torch.Tensor:
    """The suite's windows; both models must see the same tokens.

    Raises:
        CompressError: they have other tokenizers or vocabularies, so their predictions cannot be compared.
    """
    found = []
    for model in (source, base):
        if model is not None:
            folder = weights_folder(model)
            found.append(suite_tokens(suite, tokenizer(folder), model.config, str(folder)))
    sizes = {model.config.get("vocab_size") for model in (source, base) if model is not None}
    if len(sizes) > 1 or not all(torch.equal(found[0], tokens) for tokens in found):
        assert base is not None
        raise CompressError(
            f"{source.name} and {base.name} have different tokenizers or vocabularies",
            where="--against", hint="predictions cannot be compared: measure each alone, or name another model",
        )  # fmt: skip
    return found[0]


def _begin(asked: measure.Evaluation, source: Source, base: Source | None) -> None:
    """A report and a lock for a checkpoint that was not made here; those of the same comparison are kept.

    The lock comes first: it says whose the folder is.
    """
    if artifact.read_lock(asked.home).get("compared") == asked.depends and report.stands(asked.home):
        return
    document = report.build(
        artifact=_identity(source), base=_identity(base) if base else {"name": None}, verified=None,
        measurements=_size_rows(source, asked),
    )  # fmt: skip
    about = {
        "name": source.name, "repo": source.repo, "revision": source.revision, "kind": source.kind,
        "license": source.license, "weights_sha256": folder_digest(asked.artifact),
    }  # fmt: skip
    lock = {
        "version": 1, "stages": {}, "model": about, "compared": asked.depends,
        "settings": {"device": "cpu", "threads": torch.get_num_threads(), "trust_remote_code": False},
        "versions": keys.versions(),
    }  # fmt: skip
    artifact.write_json(asked.home / artifact.LOCK, lock)
    measure.publish(asked.home, document, lock, charts=False)


def _size_rows(source: Source, asked: measure.Evaluation) -> list[Row]:
    """Bytes of the checkpoints; of a GGUF file its own, not its decoded folder's, and the bits of its coded weights."""
    rows = measure.size_rows(asked.artifact, asked.base)
    if source.file is None:
        return rows
    rows[-1] = row("size_bytes", "artifact", "checkpoint", source.file.stat().st_size)
    bits = gguf_values.bits(source.file)
    return rows if bits is None else [*rows, row("bpw", "artifact", "checkpoint", bits)]


def _identity(source: Source) -> dict[str, Any]:
    about = {"name": source.repo or source.name, "revision": source.revision}
    about["architecture"] = source.config.get("model_type")
    if source.file is not None:
        types = gguf_values.scheme(source.file)
        return {**about, "format": "gguf", "scheme": types, "notes": list(decoded.NOTES), "untimed": True}
    stored = (source.config.get("quantization_config") or {}).get("quant_method")
    return {**about, "scheme": [stored or "as stored"], "notes": []}
