"""What a checkpoint folder holds: its config, its license, and whether its safetensors files are whole.

Headers are read, tensors never: a damaged or half-copied checkpoint is refused in a moment, not after hours.
Pickles are not read at all, since loading one can run code.
"""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from compress.errors import CompressError
from compress.formats.gguf_header import FILE as GGUF

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")
_AGAIN = "copy or download the folder again; what is there is not whole"


def weight_files(folder: Path) -> list[Path]:
    """The files in a folder that look like its weights."""
    return sorted(p for p in folder.glob("*") if p.suffix == ".safetensors" or p.name == GGUF)


def is_gguf(folder: Path) -> bool:
    """Whether a folder's weights are a GGUF file of ours, as its config.json says, and nothing else."""
    if [path.name for path in weight_files(folder)] != [GGUF] or not (folder / "config.json").is_file():
        return False
    return (read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method") == "gguf"


def check_weights(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, safetensors or our GGUF, after checking that each is whole.

    Every shard that the index names is there, every header can be read, every file is as long as its
    header promises, and every tensor of the index is in the shard named for it.

    Raises:
        CompressError: there are no safetensors weights, or a file is missing, truncated or damaged.
    """
    if (folder / SINGLE).is_file():
        _check_file(folder / SINGLE)
        return [folder / SINGLE]
    if is_gguf(folder):
        from compress.formats.gguf_file import contents  # here: naming a model needs no torch

        contents(folder / GGUF)
        return [folder / GGUF]
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    table = read_json(index).get("weight_map")
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


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's `config.json` says.

    Raises:
        CompressError: there is none, or it does not name a `model_type`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CompressError(
            "there is no config.json", where=str(folder), hint="name the folder that holds the config.json"
        )
    config = read_json(path)
    if not isinstance(config.get("quantization_config") or {}, dict):
        raise CompressError("`quantization_config` is not an object", where=str(path), hint=_AGAIN)
    if not isinstance(config.get("model_type"), str):
        raise CompressError("config.json names no `model_type`", where=str(path), hint="use transformers' layout")
    return config


def max_positions(config: Mapping[str, Any]) -> int:
    """Tokens of the longest context that a config.json names, by either of its names; 0 when it does not."""
    return int(config.get("max_position_embeddings") or config.get("n_positions") or 0)


def read_license(folder: Path) -> str | None:
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CompressError: it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CompressError(f"this is not JSON: {error}", where=str(path), hint=_AGAIN) from error
    if not isinstance(content, dict):
        raise CompressError("this is JSON, but not an object", where=str(path), hint=_AGAIN)
    return content


def _check_file(path: Path) -> set[str]:
    """The tensors' names in a safetensors file: 8 bytes of length, that many of JSON, then the tensors."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start == b"version ":
            raise CompressError("this is a Git LFS pointer, not the weights", where=str(path), hint="run: git lfs pull")
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
        raise CompressError("the header is damaged: not safetensors' JSON", where=str(path), hint=_AGAIN) from error
    if size != 8 + length + end:
        raise CompressError(
            f"the file has {size} bytes where its header promises {8 + length + end}",
            where=str(path),
            hint=_AGAIN,
        )
    try:
        with safe_open(path, framework="pt", backend="pread") as handle:
            return set(handle.keys())
    except SafetensorError as error:  # shapes, dtypes and spans that do not go together
        raise CompressError(f"the header is damaged: {error}", where=str(path), hint=_AGAIN) from error


def _conversion(folder: Path) -> str:
    """The command that makes a safetensors checkpoint of a pickled one; it can be copied with its indentation."""
    name, made = str(folder), f"{folder}-safetensors"
    return (
        f"where you trust whoever made it, convert it, and give {made}:\n"
        '    python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; \\\n'
        f"      M.from_pretrained({name!r}).save_pretrained({made!r}); \\\n"
        f'      T.from_pretrained({name!r}).save_pretrained({made!r})"'
    )


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
        what = f"the weights are only there as pickles ({pickles[0]}), which can run code and are not loaded"
        hint = _conversion(folder)
    elif any(folder.glob("*.gguf")):
        what = "the weights are only there as GGUF"
        hint = (
            "name the original checkpoint: a folder with safetensors weights, or its hub id; "
            "to measure the file, compress eval FILE.gguf --against ORIGINAL"
        )
    else:
        what = f"there are no weights: neither {SINGLE} nor {INDEX}"
        hint = "name a folder with safetensors weights, or a hub id"
    return CompressError(what, where=str(folder), hint=hint)
