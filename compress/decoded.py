"""A GGUF file of another tool as a checkpoint folder in the cache: its weights decoded, the base's config and words.

Everything that measures knows checkpoint folders, so the file becomes one, once, and is measured like anything else.
It is only read beside its base, which says what it must hold: a file alone would need its tokenizer rebuilt, and a
comparison needs the base's in any case.

Tensors are decoded and written one after the other, some rows at a time, in a dtype that holds them exactly: the folder
takes four bytes a weight. It says nothing of the file's speed, so that is not measured.

Left out: removing folders whose file is gone; a whole cache of them can be deleted at any time.
"""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from compress import artifact, keys
from compress.errors import CompressError
from compress.evaluation.text import show_bytes
from compress.files import make_folder
from compress.formats import gguf_values
from compress.models.digest import remembered_digest
from compress.models.files import SINGLE, read_config
from compress.models.load import StreamedModel, open_model
from compress.models.source import Source
from compress.paths import cache_dir
from compress.shards import MadeTensor, write_made

NOTES = (
    "the file's weights were decoded to float32 and multiplied by inputs as they are; llama.cpp rounds the inputs "
    "of coded weights to 8 bits, so what it computes differs a little",
    "speed and memory not measured: of decoded weights they say nothing of the file",
)
_SOURCES = ("decoded.py", "shards.py", "formats/gguf*.py")
_GENERATION = "generation_config.json"
Progress = Callable[[str, int, int], None]


def gguf_file_of(target: str) -> Path | None:
    """The GGUF file that a name means; None where it means something else.

    Raises:
        CompressError: it means one that is not there.
    """
    path = Path(target).expanduser()
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise CompressError("there is no such file", where=target, hint="check the path")
    return path.absolute()


def check(file: Path, base: Source) -> None:
    """Refuses a file that is not of the base, or not decoded here; reads headers only.

    Raises:
        CompressError: what is wrong with it; see `gguf_values.check`.
    """
    model = _skeleton(base)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.skeleton.state_dict().items()}
    tied = bool(model.resolved.get("tie_word_embeddings"))
    gguf_values.check(file, model.resolved, shapes, f"{model.family.head}.weight" if tied else None)


def decoded(file: Path, base: Source, progress: Progress) -> Source:
    """The file as a model: a folder in the cache, made the first time.

    Args:
        base: the model that it was made from, with its folder.

    Raises:
        CompressError: as `check`, or there is no room for the decoded weights.
    """
    assert base.path is not None, "weights were asked for"
    check(file, base)
    depends = [remembered_digest(file), base.config, keys.word_digests(base.path)]
    out = cache_dir() / "gguf" / f"{file.stem}-{keys.stage_key(depends, *_SOURCES)[:8]}"
    make_folder(out, functools.partial(_fill, file, base, progress=progress))
    return Source(file.stem, out, read_config(out), license=base.license, kind="gguf", file=file)


def _skeleton(base: Source) -> StreamedModel:
    def none(prefix: str) -> dict[str, Tensor]:
        raise AssertionError(f"no weights are read here, asked for {prefix}")

    return open_model(base.path or Path(), base.config, none, where=str(base.path or base.name))


def _fill(file: Path, base: Source, folder: Path, progress: Progress) -> None:
    """Writes config, words and weights into an empty folder."""
    assert base.path is not None
    weights = gguf_values.weights(file)
    done = 0

    def rows(stored: str) -> Iterator[Tensor]:
        nonlocal done
        progress("decode", done, len(weights))
        yield from gguf_values.decode(file, stored)
        done += 1

    tensors = [
        MadeTensor(name, gguf_values.dtype(found), found.shape, functools.partial(rows, stored))
        for name, (stored, found) in weights.items()
    ]
    _check_room(folder, sum(tensor.bytes for tensor in tensors))
    for path in [*keys.word_files(base.path), *base.path.glob(_GENERATION)]:
        shutil.copyfile(path, folder / path.name)
    head = f"{_skeleton(base).family.head}.weight"
    untied = {"tie_word_embeddings": False} if head in weights else {}
    settings = {k: v for k, v in base.config.items() if k != "torch_dtype"}
    artifact.write_config(folder, {**settings, **untied, "dtype": "float32"}, None)
    write_made(folder / SINGLE, sorted(tensors, key=lambda tensor: tensor.dtype != "F32"))  # aligned to their width
    progress("decode", len(weights), len(weights))


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CompressError(
            f"the decoded weights take {show_bytes(size)} on the disk, and {show_bytes(free)} are free",
            where=str(folder.parent.parent), hint="free some, or name another place: COMPRESS_CACHE=FOLDER",
        )  # fmt: skip
