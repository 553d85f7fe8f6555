"""Chains: reads see what was committed, writes go beside it, and a kill between them costs nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.calibration.chain import Chain

SHAPE = (5, 3, 4)


def rows(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def make(folder: Path, dtype: torch.dtype = torch.float32, parity: int = 0) -> Chain:
    return Chain(folder / "chain", SHAPE, dtype, parity)


@pytest.mark.parametrize("parity", [0, 1])
def test_what_is_filled_is_read(tmp_path: Path, parity: int) -> None:
    chain, x = make(tmp_path, parity=parity), rows(0)
    chain.fill(0, x[:2])
    chain.fill(2, x[2:])
    assert torch.equal(chain.read(0, 5), x)
    assert torch.equal(chain.read(1, 3), x[1:3])
    assert torch.equal(chain.read(4, 9), x[4:])  # the last batch may be asked for whole
    assert (tmp_path / f"chain.{parity}").stat().st_size == 5 * 3 * 4 * 4


def test_writes_stay_beside_until_the_flip(tmp_path: Path) -> None:
    chain, old, new = make(tmp_path), rows(0), rows(1)
    chain.fill(0, old)
    chain.write(0, new[:3])
    chain.write(3, new[3:])
    assert torch.equal(chain.read(0, 5), old)
    assert torch.equal(chain.other(0, 5), new)
    chain.flip()
    assert torch.equal(chain.read(0, 5), new)
    assert torch.equal(chain.other(0, 5), old)


def test_blocks_take_turns_with_two_files(tmp_path: Path) -> None:
    chain = make(tmp_path)
    chain.fill(0, rows(0))
    for block in range(1, 4):
        for start in (0, 2, 4):  # in place of a block's forward pass: read, change, write beside
            chain.write(start, chain.read(start, start + 2) + 1)
        chain.flip()
        assert chain.parity == block % 2
    torch.testing.assert_close(chain.read(0, 5), rows(0) + 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chain.0", "chain.1"]


@pytest.mark.parametrize("written", [1, 3, 5])
def test_a_kill_before_the_commit_leaves_the_current_rows(tmp_path: Path, written: int) -> None:
    chain, old, new = make(tmp_path), rows(0), rows(1)
    chain.fill(0, rows(2))
    chain.write(0, old)
    chain.flip()
    committed = chain.parity
    chain.write(0, new[:written])
    del chain  # killed: only the files and the recorded parity are left
    resumed = make(tmp_path, parity=committed)
    assert torch.equal(resumed.read(0, 5), old)
    resumed.write(0, new)
    resumed.flip()
    assert torch.equal(resumed.read(0, 5), new)


def test_a_kill_after_the_flip_but_before_its_record(tmp_path: Path) -> None:
    chain, old, new = make(tmp_path), rows(0), rows(1)
    chain.fill(0, old)
    chain.write(0, new)
    chain.sync()
    chain.flip()
    assert torch.equal(make(tmp_path).read(0, 5), old)  # the record still says 0
    assert torch.equal(make(tmp_path, parity=1).read(0, 5), new)


def test_bfloat16_rows_are_rounded_once(tmp_path: Path) -> None:
    chain, x = make(tmp_path, torch.bfloat16), rows(0)
    chain.fill(0, x)
    read = chain.read(0, 5)
    assert read.dtype == torch.float32
    assert torch.equal(read, x.bfloat16().float())
    assert not torch.equal(read, x)
    chain.write(0, read)
    chain.flip()
    assert torch.equal(chain.read(0, 5), read)
    assert (tmp_path / "chain.0").stat().st_size == 5 * 3 * 4 * 2


def test_rows_need_not_be_contiguous(tmp_path: Path) -> None:
    chain, x = make(tmp_path), rows(0)
    chain.fill(0, x.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(chain.read(0, 5), x)


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    chain, x = make(tmp_path), rows(0)
    chain.fill(0, x)
    chain.read(0, 5).zero_()
    assert torch.equal(chain.read(0, 5), x)


def test_a_short_file_is_noticed(tmp_path: Path) -> None:
    chain = make(tmp_path)
    chain.fill(0, rows(0)[:2])
    assert torch.equal(chain.read(0, 2), rows(0)[:2])
    with pytest.raises(AssertionError, match="short"):
        chain.read(0, 5)
