"""Joined checkpoints: split, indexed, aligned, and read back by safetensors' own reader."""

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import shards
from compress.shards import save_tensors, stored_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(10, 8, generator=generator).bfloat16(),
        "packed": torch.randint(-(2**31), 2**31 - 1, (5, 3), generator=generator, dtype=torch.int32),
        "bytes": torch.arange(-3, 4, dtype=torch.int8),
        "shape": torch.tensor([5, 24]),
        "norm": torch.randn(7, generator=generator),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """The tensors in two files, with metadata."""
    items = list(tensors().items())
    files = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    save_file(dict(items[:3]), files[0], metadata={"source": "x"})
    save_file(dict(items[3:]), files[1])
    return files


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def stored(files: list[Path]) -> list[shards.StoredTensor]:
    return [tensor for file in files for tensor in stored_tensors(file)]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_stored_tensors_are_those_of_the_file(sources: list[Path]) -> None:
    expected = tensors()
    for tensor in stored(sources):
        original = expected.pop(tensor.name)
        assert tensor.shape == tuple(original.shape)
        data = tensor.file.read_bytes()[tensor.start : tensor.end]
        assert data == original.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert not expected


def test_one_file_holds_all(sources: list[Path], out: Path) -> None:
    assert write_checkpoint(out, stored(sources)) == [out / "model.safetensors"]
    assert_same(load_file(out / "model.safetensors"), tensors())
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]  # no index, nothing temporary
    for backend in ("mmap", "pread"):
        with safe_open(out / "model.safetensors", "pt", backend=backend) as file:
            assert file.metadata() == {"format": "pt"}
            assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors())  # noqa: SIM118


def test_the_header_ends_on_eight_bytes(sources: list[Path], out: Path) -> None:
    for count in range(1, len(tensors()) + 1):
        write_checkpoint(out, stored(sources)[:count])
        data = (out / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        assert [start for start, _ in ends] == [0] + [end for _, end in ends[:-1]]  # no holes
        assert 8 + length + ends[-1][1] == len(data)


def test_shards_are_within_the_limit_and_indexed(sources: list[Path], out: Path) -> None:
    limit = 100  # less than the embedding, which then has a shard of its own
    paths = write_checkpoint(out, stored(sources), limit)
    assert [p.name for p in paths] == [f"model-{i + 1:05d}-of-{len(paths):05d}.safetensors" for i in range(len(paths))]
    assert {p.name for p in out.iterdir()} == {INDEX, *(p.name for p in paths)}
    found: dict[str, Tensor] = {}
    index = json.loads((out / INDEX).read_text())
    for path in paths:
        shard = load_file(path)
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= limit
        assert {index["weight_map"][name] for name in shard} == {path.name}
        assert not found.keys() & shard.keys()
        found |= shard
    assert len(paths) > 2
    assert_same(found, tensors())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


def test_a_shard_is_filled_to_the_last_byte(tmp_path: Path, out: Path) -> None:
    save_file({name: torch.ones(4) for name in "abcd"}, tmp_path / "in.safetensors")
    paths = write_checkpoint(out, stored_tensors(tmp_path / "in.safetensors"), 32)
    assert [len(load_file(p)) for p in paths] == [2, 2]


def test_long_tensors_are_copied_in_pieces(sources: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_COPY_BYTES", 7)
    write_checkpoint(out, stored(sources))
    assert_same(load_file(out / "model.safetensors"), tensors())


def test_a_failed_write_leaves_the_old_file(sources: list[Path], out: Path) -> None:
    write_checkpoint(out, stored(sources[1:]))
    before = (out / "model.safetensors").read_bytes()
    items = stored(sources)
    sources[0].write_bytes(sources[0].read_bytes()[:-1])
    with pytest.raises(AssertionError, match="ends before"):
        write_checkpoint(out, items)
    assert (out / "model.safetensors").read_bytes() == before


def test_the_same_tensors_give_the_same_bytes(sources: list[Path], tmp_path: Path) -> None:
    data = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        data.append([p.read_bytes() for p in write_checkpoint(tmp_path / name, stored(sources), 100)])
    assert data[0] == data[1]


def test_a_disk_that_takes_no_more_is_said_as_by_any_file(tmp_path: Path) -> None:
    """The library tells only in words which error it was."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_tensors({"a": torch.zeros(4096)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "a.safetensors")
