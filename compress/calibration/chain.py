"""Activations between blocks, kept in files: bounded memory, and the state that a crash cannot spoil.

A chain is one [N, T, D] tensor in one of two files. A block reads from the current file and writes to the
other; `flip` makes the other current once the block is committed. A kill at any moment leaves the current
file whole. Plain reads and writes: pages of a mapped file would count as memory.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.files import sync


@dataclass
class Chain:
    """Double-buffered activations.

    Attributes:
        path: prefix of the two files.
        shape: (N, T, D).
        dtype: of the stored values; `read` returns float32.
        parity: which of the two files is current.
    """

    path: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype
    parity: int = 0

    def _file(self, parity: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{parity}")

    @property
    def _row_bytes(self) -> int:
        return self.shape[1] * self.shape[2] * self.dtype.itemsize

    def read(self, start: int, end: int) -> Tensor:
        """Rows [start, end) of the current file, float32 [n, T, D]."""
        return self._read(self._file(self.parity), start, end)

    def other(self, start: int, end: int) -> Tensor:
        """Rows of the other file, which were written since the last flip."""
        return self._read(self._file(1 - self.parity), start, end)

    def _read(self, path: Path, start: int, end: int) -> Tensor:
        count = min(end, self.shape[0]) - start
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), count * self._row_bytes, start * self._row_bytes)
        assert len(data) == count * self._row_bytes, "activation file is short"
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(count, *self.shape[1:]).float()

    def write(self, start: int, rows: Tensor) -> None:
        """Writes rows from `start` on, to the file that is not current."""
        self._write(self._file(1 - self.parity), start, rows)

    def fill(self, start: int, rows: Tensor) -> None:
        """Writes rows from `start` on, to the current file: the chain's beginning."""
        self._write(self._file(self.parity), start, rows)

    def _write(self, path: Path, start: int, rows: Tensor) -> None:
        data: Any = rows.to(self.dtype).contiguous().view(torch.uint8).numpy().reshape(-1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            view, offset = memoryview(data), start * self._row_bytes
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

    def is_whole(self) -> bool:
        """Whether the current file has the length that it should."""
        path = self._file(self.parity)
        return path.is_file() and path.stat().st_size == self.shape[0] * self._row_bytes

    def sync(self) -> None:
        """Forces both files to the disk, before the record that makes one of them current."""
        for path in filter(Path.exists, (self._file(0), self._file(1))):
            sync(path)

    def flip(self) -> None:
        """Makes the file that was written current."""
        self.parity = 1 - self.parity
