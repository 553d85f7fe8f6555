"""What a stage depends on, hashed: a stage whose key stands in the lock is not run again.

A key holds the source of the code that makes the numbers, so that a mended fault is computed anew. The thread
count is not in the key of the compression: a run may go on with other threads.
"""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from compress.artifact import digest, file_digest
from compress.calibration.data import ResolvedData
from compress.models.digest import folder_digest
from compress.models.load import calibration_dtype
from compress.models.source import Source
from compress.plan import Plan
from compress.recipe import Recipe

_PACKAGE = Path(__file__).parent
_SOURCES = (
    "activations.py", "numerics.py", "schemes.py", "shards.py", "artifact.py", "calibration/*.py", "formats/*.py",
    "models/*.py",
)  # fmt: skip
_WORDS = ("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens*", "added_tokens*", "chat_template*")


def stage_key(depends: list[Any], *sources: str) -> str:
    """The hash of plain data and of source files, named below the package (patterns allowed)."""
    files = sorted(file for pattern in sources for file in _PACKAGE.glob(pattern))
    return digest([depends, [file_digest(file) for file in files]])


def checkpoint_key(folder: Path) -> str:
    """What a checkpoint's answers depend on: its config, weights and tokenizer."""
    return digest([file_digest(folder / "config.json"), folder_digest(folder), word_digests(folder)])


def word_files(folder: Path) -> list[Path]:
    """The tokenizer's files."""
    return sorted({file for pattern in _WORDS for file in folder.glob(pattern) if file.is_file()})


def word_digests(folder: Path) -> list[tuple[str, str]]:
    """Digests of the tokenizer's files."""
    return [(file.name, file_digest(file)) for file in word_files(folder)]


def compress_key(recipe: Recipe, plan: Plan, source: Source, data: ResolvedData) -> str:
    """What the artifact's weights depend on."""
    assert source.path is not None
    document = recipe.document()
    for cosmetic in ("summary", "evaluate"):
        document.pop(cosmetic)
    depends = [
        document, plan.document()["rows"], plan.sequential, source.config, folder_digest(source.path),
        word_digests(source.path), data.dataset, data.sha256,
        str(calibration_dtype()), torch.__version__, importlib.metadata.version("transformers"),
    ]  # fmt: skip
    shared = ("base", "scale_search", "rounding", "awq")
    methods = [f"methods/{name}.py" for name in (*shared, *(step.method for step in recipe.steps))]
    return stage_key(depends, *_SOURCES, *methods)


def versions() -> dict[str, str]:
    """Versions of what computed, for the lock."""
    names = ("compress", "torch", "transformers", "compressed-tensors", "safetensors", "gguf", "tokenizers", "lm_eval")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "source"
    return found
