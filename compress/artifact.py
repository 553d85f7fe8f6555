"""The artifact: one folder with the checkpoint, what was asked, what was done and with what exactly.

Left out: pushing it anywhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress.activations import wire_cache, wire_inputs
from compress.calibration.state import TRACE, State
from compress.errors import CompressError
from compress.files import replace
from compress.formats import FORMATS
from compress.formats.base import INPUT_SCALE, Format
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.digest import remembered_digest
from compress.models.files import INDEX, check_weights
from compress.models.load import Reader, StreamedModel, linears, open_model
from compress.schemes import CACHE_SCALES, QuantArgs, Scheme
from compress.shards import StoredTensor, stored_tensors, write_checkpoint
from compress.tables import resolve

LOCK = "lock.json"
DOCUMENTS = "documents"  # every document's answers
GENERATION = "generation.jsonl"  # what both models wrote
CHARTS = "charts"
STATE = ".state"
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".msgpack",
    ".h5",
    ".ckpt",
    ".tflite",
)
_MODEL = {"name", "kind", "license"}  # what every lock says of a model
WRITTEN_ONCE = (".safetensors", ".gguf")
_FIRST = {LOCK, "data.json", "windows.safetensors", "windows.json", "key"}  # a lock, and a state's, in their order
_OURS = {
    "config.json",
    "quantize_config.json",
    "recipe.yaml",
    "plan.json",
    LOCK,
    "report.json",
    "report.html",
    "README.md",
    GENERATION,
}


def digest(value: Any) -> str:
    """sha256 of plain data, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(folder: Path, source: Path | None) -> None:
    """Refuses a folder that holds something other than an artifact of ours, or lies in the model's own.

    Raises:
        CompressError: it is a file, or a folder that is not empty and has neither our lock nor our state.
    """
    check_place(folder, source)
    if folder.is_dir() and not _is_ours(folder):
        raise CompressError(
            "the output folder holds something else",
            where=str(folder),
            hint="choose another --out, or empty it",
        )


def check_place(folder: Path, source: Path | None) -> None:
    """Refuses a place where no folder can be written, or that lies in a model's own.

    Raises:
        CompressError: it is a file, or below one, or nothing can be written there.
    """
    if source is not None and source.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise CompressError("the output lies in the model's folder", where=str(folder), hint="choose another --out")
    above = (folder, *folder.absolute().parents)
    if any(path.is_symlink() and not path.exists() for path in above):
        raise CompressError("the output is a link that leads nowhere", where=str(folder), hint="choose another --out")
    existing = next(path for path in above if path.exists())
    if not existing.is_dir():
        kind = "is a file, not a folder" if existing == folder else f"would lie below a file ({existing})"
        raise CompressError(f"the output {kind}", where=str(folder), hint="choose another --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        hint = f"choose another --out, or make {existing} writable"
        raise CompressError(f"nothing can be written in {existing}", where=str(folder), hint=hint)


def _is_ours(folder: Path) -> bool:
    """Whether a run may write here: an artifact, even with a damaged lock; a run that was begun; an empty folder."""
    begun = folder / STATE / "key"
    if read_lock(folder) or begun.is_file() or all((folder / name).is_file() for name in ("recipe.yaml", "plan.json")):
        return True
    inside = [*folder.iterdir(), *begun.parent.glob("*")]  # before the key was written there may be these
    return all((path == begun.parent and path.is_dir()) or path.name.removesuffix(".tmp") in _FIRST for path in inside)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds the artifact's folder for this process.

    Raises:
        CompressError: another run is at work in it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CompressError(
            "another run is at work in this folder", where=str(folder), hint="wait for it to end, or name another --out"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def is_done(folder: Path, key: str) -> bool:
    """Whether the folder holds the verified artifact of a key, with whole weights."""
    if read_lock(folder).get("stages", {}).get("compress") != key:
        return False
    try:
        check_weights(folder)
        return not altered(folder)
    except CompressError:
        return False


def altered(folder: Path) -> list[str]:
    """Files of the checkpoint that are not as the lock says: weights and config."""
    files = read_lock(folder).get("files", {})
    kept = {n: d for n, d in files.items() if n.endswith(WRITTEN_ONCE) or n == "config.json"}
    return [n for n, d in kept.items() if not (folder / n).is_file() or remembered_digest(folder / n) != d]


def holds_state(folder: Path, key: str) -> bool:
    """Whether an interrupted run of a key can go on in this folder."""
    stamp = folder / STATE / "key"
    return stamp.is_file() and stamp.read_text() == key


def state_bytes(folder: Path) -> int:
    """Bytes that an interrupted run already takes."""
    return sum(p.stat().st_size for p in (folder / STATE).glob("*") if p.is_file())


def clear_state(folder: Path) -> None:
    """Empties the resumable state of another key, what makes it resumable first.

    The old key stays until a new one replaces it: it says that the folder is ours.
    """
    state = folder / STATE
    state.mkdir(exist_ok=True)
    (state / "progress.json").unlink(missing_ok=True)
    for path in state.iterdir():
        if path.name != "key":
            path.unlink()


def remove_proof(folder: Path) -> None:
    """Deletes lock and report, then the weights that they speak of: new weights never stand beside an old proof."""
    weights = [*folder.glob("model*.gguf*"), *folder.glob("model*.safetensors*")]
    ours = (LOCK, "report.json", GENERATION, "quantize_config.json", INDEX)
    for path in (*(folder / name for name in ours), *weights):
        path.unlink(missing_ok=True)
    for evidence in (DOCUMENTS, CHARTS):
        shutil.rmtree(folder / evidence, ignore_errors=True)


def read_lock(folder: Path) -> dict[str, Any]:
    """The artifact's lock; empty when there is none, or none that can be read: then nothing counts as done."""
    try:
        lock = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    whole = isinstance(lock, dict) and all(isinstance(lock.get(part), dict) for part in ("stages", "model"))
    whole = whole and lock["model"].keys() >= _MODEL
    if whole and "compress" in lock["stages"]:
        whole = all(isinstance(lock.get(part), dict) for part in ("recipe", "files"))
    return dict(lock) if whole else {}


def write_json(path: Path, value: Any) -> None:
    """Writes plain data so that a reader sees the old file or the new one."""
    replace(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def assemble(
    folder: Path,
    source: Path,
    config: Mapping[str, Any],
    state: State,
    about: tuple[Format, dict[str, Any] | None, str],
    model: StreamedModel,
) -> None:
    """Closes the checkpoint: weights, config.json and the source's other files.

    Args:
        folder: the artifact.
        source: the base model's folder.
        config: the base model's config.
        state: the finished walk.
        model: the base, which knows its tensors' names.
        about: the format; config.json's `quantization_config`, None for an ordinary checkpoint; the model's name.
    """
    fmt, settings, name = about
    base = open_checkpoint(source)
    coded = [t for i in range(len(state.blocks)) for t in stored_tensors(state.block_file(i)) if t.name != TRACE]
    prefix = state.blocks[0]["name"].rsplit(".", 1)[0] + "."
    others: list[StoredTensor] = []
    names = model.family.module_tensors(base.files)
    for file in sorted(set(base.files.values())):
        for tensor in stored_tensors(source / file):
            if not names[tensor.name].startswith(prefix):
                others.append(replace_fields(tensor, name=names[tensor.name]))
    write_tensors(folder, others + coded, (fmt, source, name), model)
    write_config(folder, config, settings)
    copy_sidecars(source, folder)


def write_config(folder: Path, config: Mapping[str, Any], settings: dict[str, Any] | None) -> None:
    """config.json: the base's, with what loaders must know of the coding.

    transformers 5 says `rope_theta` inside `rope_parameters` only, where older loaders overlook it and silently take
    10000: it is said in both places. Scalings of the rotary embedding are not: older loaders spell them otherwise.
    """
    document = {k: v for k, v in config.items() if k != "quantization_config"}
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        document.setdefault("rope_theta", theta)
    if settings is not None:
        document["quantization_config"] = settings
    write_json(folder / "config.json", document)


def write_tensors(
    folder: Path,
    tensors: list[StoredTensor],
    about: tuple[Format, Path, str],
    model: StreamedModel,
) -> None:
    """Writes a model's tensors, by their modules' names, as the format lays them down.

    Args:
        about: the format; the folder of the tokenizer; the model's name.
        model: whose tensors they are.
    """
    fmt, words, name = about
    if fmt.close is not None:
        parts = [tensor for tensor in tensors if not tensor.name.endswith(model.ignored)]
        fmt.close(folder, parts, model.resolved, words, name)
    else:
        write_checkpoint(folder, [replace_fields(t, name=model.family.stored_tensor(t.name)) for t in tensors])


def copy_sidecars(source: Path, folder: Path) -> None:
    """Copies the source's other files, byte for byte; a model's card becomes README.base.md, one of ours is left."""
    for path in _sidecars(source):
        relative = path.relative_to(source)
        if str(relative) == "README.md" and (source / LOCK).is_file():
            continue
        target = folder / ("README.base.md" if str(relative) == "README.md" else relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _sidecars(source: Path) -> list[Path]:
    """The source's files that are neither weights nor written by us, byte for byte."""
    found = []
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts) or relative.parts[0] in (DOCUMENTS, CHARTS)
        weights = path.name.endswith(_WEIGHTS) or path.name.endswith(".index.json") or "original" in relative.parts
        if path.is_file() and not hidden and not weights and str(relative) not in _OURS - {"README.md"}:
            found.append(path)
    return found


def read_schemes(config: Mapping[str, Any], names: list[str]) -> tuple[Format | None, dict[str, Scheme]]:
    """The format and schemes that a config.json declares for its linear layers.

    Raises:
        CompressError: a quantization method that is not read.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None, {}
    fmt = resolve(FORMATS, str(settings.get("quant_method")), kind="format", where="config.json")
    assert isinstance(fmt, Format)
    return fmt, fmt.read_config(settings, names)


def check_claims(checkpoint: Checkpoint, fmt: Format, schemes: Mapping[str, Scheme]) -> None:
    """Holds what a config says to be coded against the tensors that are there.

    Raises:
        CompressError: a layer is said to be coded and is not, or the other way round.
    """
    marks = {part for part in fmt.parts if part not in ("weight", INPUT_SCALE)}
    coded = {name.rpartition(".")[0] for name in checkpoint.files if name.rpartition(".")[2] in marks}
    odd = sorted(coded ^ set(schemes))
    if marks and odd:
        said = "says" if odd[0] in schemes else "does not say"
        raise CompressError(
            f"config.json {said} that {odd[0]} is coded in the format {fmt.name}, and the weights differ",
            where=str(checkpoint.folder), hint="the checkpoint comes from a tool whose words are not read here",
        )  # fmt: skip


def coded_activations(folder: Path) -> dict[str, str]:
    """How a checkpoint says that its layers' inputs are quantized ("activations"), and its cache ("kv_cache")."""
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    groups = settings.get("config_groups") or {}
    inputs = [a for group in groups.values() if (a := group.get("input_activations"))]
    said = {"activations": inputs, "kv_cache": [settings["kv_cache_scheme"]] if settings.get("kv_cache_scheme") else []}
    return {key: ", ".join(dict.fromkeys(map(_kind, every))) for key, every in said.items() if every}


def _kind(args: Mapping[str, Any]) -> str:
    """A coding of activations in a few words, such as "int8 token"."""
    what = f"{args.get('type', 'int')}{args.get('num_bits', 8)} {args.get('strategy')}"
    return what + ("" if args.get("dynamic") else " static")


def open_artifact(folder: Path) -> StreamedModel:
    """An artifact, or any checkpoint that we read, as a streamed model with decoded weights and quantized inputs."""
    config = json.loads((folder / "config.json").read_text())
    plain = open_model(folder, config)
    fmt, schemes = read_schemes(config, [name for name, _, _ in linears(plain.skeleton)])
    if fmt is None:
        return plain
    checkpoint = plain.fit(open_checkpoint(folder))
    check_claims(checkpoint, fmt, schemes)
    reader = decoding_reader(checkpoint, fmt, schemes)
    kv_cache = fmt.read_cache(config["quantization_config"])
    return CodedModel(plain.skeleton, plain.family, reader, checkpoint, fmt, schemes, kv_cache)


@dataclass(frozen=True)
class CodedModel(StreamedModel):
    """A model whose coded weights are decoded, and whose layers round their inputs, as its checkpoint says."""

    checkpoint: Checkpoint
    format: Format
    schemes: Mapping[str, Scheme]
    kv_cache: QuantArgs | None

    @property
    def rounds(self) -> bool:
        """Whether activations are quantized, in front of layers or in the cache."""
        return self.kv_cache is not None or any(scheme.input_activations for scheme in self.schemes.values())

    def block(self, index: int) -> nn.Module:
        """Block `index`; see `StreamedModel.block`."""
        module = super().block(index)
        for name, rounding in wire_inputs(module, self.block_name(index), self.schemes).items():
            part = f"{name}.{INPUT_SCALE}"
            rounding.switch_on(None if rounding.args.dynamic else self.checkpoint.read([part])[part].float())
        if self.kv_cache is not None:
            switch_cache_on(module, self.block_name(index), self.kv_cache, self.checkpoint)
        return module


def switch_cache_on(module: nn.Module, name: str, args: QuantArgs, checkpoint: Checkpoint) -> None:
    """Makes the attention layers of `module`, whose full name is `name`, quantize keys and values."""
    for attention, rounding in wire_cache(module, name, args).items():
        parts = [f"{attention}.{part}" for part in CACHE_SCALES]
        keys, values = map(checkpoint.read(parts).__getitem__, parts)
        rounding.switch_on((keys.float(), values.float()))


def decoding_reader(checkpoint: Checkpoint, fmt: Format, schemes: Mapping[str, Scheme]) -> Reader:
    """Reads tensors, decoding the weights that have a scheme."""

    def read(prefix: str) -> dict[str, Tensor]:
        stored = checkpoint.read(checkpoint.below(prefix))
        for name in [n for n in schemes if n == prefix or n.startswith(prefix + ".")]:
            weight_OI = fmt.decode(name, stored, schemes[name])
            for part in fmt.parts:
                stored.pop(f"{name}.{part}", None)
            stored[f"{name}.weight"] = weight_OI
        return {name: tensor for name, tensor in stored.items() if not name.endswith(CACHE_SCALES)}

    return read


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of a folder's weights."""
    checkpoint = open_checkpoint(folder)
    return sum((folder / file).stat().st_size for file in set(checkpoint.files.values()))


def remove_state(folder: Path) -> None:
    """Deletes the resumable state."""
    shutil.rmtree(folder / STATE, ignore_errors=True)
