"""A checkpoint as it lies on the disk: which tensor is in which file, read one at a time and never mapped."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from compress.errors import CompressError
from compress.formats import gguf_file
from compress.formats.gguf_header import FILE as GGUF
from compress.models.files import INDEX, SINGLE, is_gguf


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files, or one with a GGUF file: which tensor lies in which file.

    Attributes:
        folder: where they are.
        files: tensors to files.
        spelled: names in the files, of tensors that are named otherwise here.
        transposed: weights that are stored as [I, O]; `read` gives [O, I].
    """

    folder: Path
    files: Mapping[str, str]
    spelled: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """The named tensors, in the dtype in which they are stored."""
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in names}):
            if file == GGUF:
                tensors |= {name: gguf_file.read(self.folder / file, name) for name in names}
                continue
            with safe_open(self.folder / file, framework="pt", backend="pread") as handle:
                for name in names:
                    if self.files[name] == file:
                        tensor = handle.get_tensor(self.spelled.get(name, name))
                        tensors[name] = tensor.t().contiguous() if name in self.transposed else tensor
        return tensors

    def below(self, prefix: str) -> list[str]:
        """Names of the tensors under a module."""
        return sorted(name for name in self.files if name.startswith(prefix + "."))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of a folder's weights.

    Raises:
        CompressError: the folder has no safetensors weights, and no GGUF file of ours.
    """
    single, index = folder / SINGLE, folder / INDEX
    if is_gguf(folder):
        return Checkpoint(folder, dict.fromkeys(gguf_file.contents(folder / GGUF), GGUF))
    if not single.is_file() and index.is_file():
        return Checkpoint(folder, json.loads(index.read_text())["weight_map"])
    if not single.is_file():
        raise CompressError("no safetensors weights", where=str(folder), hint="name a folder that holds some")
    with safe_open(single, framework="pt", backend="pread") as handle:
        return Checkpoint(folder, dict.fromkeys(handle.keys(), single.name))
