"""Digests of weights: of names and bytes, remembered, and computed again when what was remembered is no digest."""

import hashlib
from pathlib import Path

import pytest
from conftest import MakeTiny

from compress.models.digest import folder_digest, remembered_digest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


def test_of_a_files_bytes_and_remembered(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    wanted = hashlib.sha256(b"bytes").hexdigest()
    assert remembered_digest(file) == wanted
    (kept,) = cache.iterdir()
    kept.write_text(f'"{"0" * 64}"')
    assert remembered_digest(file) == "0" * 64  # it was not read again
    file.write_bytes(b"other")
    assert remembered_digest(file) == hashlib.sha256(b"other").hexdigest()


@pytest.mark.parametrize("damage", ["", "null", '"x"', "[]", "{", "\xff"])
def test_what_is_no_digest_is_computed_again(damage: str, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    wanted = remembered_digest(file)
    (kept,) = cache.iterdir()
    kept.write_bytes(damage.encode("latin-1"))
    assert remembered_digest(file) == wanted
    assert kept.read_text() == f'"{wanted}"'


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file where the cache should be")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "taken"))
    assert remembered_digest(tmp_path / "taken") == hashlib.sha256(b"a file where the cache should be").hexdigest()


def test_of_a_folder(tiny: MakeTiny) -> None:
    first, second = tiny("llama", tied=True), tiny("llama", tied=False)
    assert folder_digest(first) == folder_digest(first)
    assert folder_digest(first) != folder_digest(second)
