"""Prompts are checked before any work; a base is asked once; the texts are kept and read again."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTiny

from compress.artifact import GENERATION
from compress.errors import CompressError
from compress.evaluation import continuations, greedy
from compress.evaluation.generation import Written
from compress.evaluation.prompts import Prompts
from compress.evaluation.suite import Suite, load_suite
from compress.models.words import end_tokens, tokenizer


def suite(folder: Path, *texts: str, output: int = 4) -> Suite:
    document = {"version": 1, "summary": "few", "prompts": [{"text": text} for text in texts]}
    (folder / "few.yaml").write_text(json.dumps(document))  # JSON is YAML
    (folder / "suite.yaml").write_text(f"version: 1\nsummary: s\ngeneration: {{prompts: few.yaml, output: {output}}}\n")
    return load_suite(str(folder / "suite.yaml"))


def test_prompts_as_tokens(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=True)
    (ids,) = continuations.prompt_ids(suite(tmp_path, "ab"), model)
    assert ids[0] == 0  # the tokenizer's own <s>
    assert tokenizer(model).decode(ids[1:]) == "ab"


def test_what_the_model_cannot_see_is_refused(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=True)
    assert continuations.prompt_ids(suite(tmp_path, "a" * 1000, output=23), model)
    with pytest.raises(CompressError, match=r"24 new tokens are 1025 tokens, and the model sees 1024") as caught:
        continuations.prompt_ids(suite(tmp_path, "a" * 1000, output=24), model)
    assert "generation.prompts" in str(caught.value)
    assert "aaa…" in str(caught.value)


def test_the_tokens_that_end_an_output(tiny: MakeTiny, tmp_path: Path) -> None:
    words = tokenizer(tiny("llama", tied=True))
    assert end_tokens(tmp_path, words) == [1]
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_tokens(tmp_path, words) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert end_tokens(tmp_path, words) == [5, 6]


def test_a_model_is_asked_once(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is remembered; another limit, or a damaged file, is asked anew and gives the same."""
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    asked: list[dict[str, Any]] = []

    def call(module: str, request: dict[str, Any], **_: Any) -> Any:
        assert module == "compress.evaluation.greedy"
        asked.append(request)
        return greedy.answer(json.loads(json.dumps(request)))

    monkeypatch.setattr(continuations, "call", call)
    monkeypatch.setattr(greedy, "tell", lambda *_: None)
    model = tiny("llama", tied=True)
    ids = continuations.prompt_ids(suite(tmp_path, "one", "three"), model)

    def outputs(output: int = 4) -> Any:
        return continuations.outputs(
            model, ids, continuations.endings(model), output, dtype="float32", threads=1, progress=lambda *_: None
        )

    first = outputs()
    assert outputs() == first
    assert len(asked) == 1
    (kept,) = (tmp_path / "cache" / "continuations").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"true", b"1").replace(b"tokens", b"tokenz"))
    assert outputs() == first
    assert len(asked) == 2
    assert [said["tokens"][:4] for said in outputs(5)] == [said["tokens"] for said in first]
    assert len(asked) == 3


def test_texts_are_kept_line_by_line(tmp_path: Path) -> None:
    prompts = Prompts.model_validate({"version": 1, "summary": "s", "prompts": [{"kind": "list", "text": "Count:\n"}]})
    base = [{"tokens": [4, 5, 6], "text": "a\u2028b\n", "ended": False}]
    mine = [{"tokens": [4, 9], "text": "c", "ended": True}]
    continuations.keep(tmp_path, prompts, base, mine)
    (line,) = (tmp_path / GENERATION).read_text().split("\n")[:-1]
    assert json.loads(line) == {
        "kind": "list", "prompt": "Count:\n", "alike": 1, "base": base[0], "artifact": mine[0],
    }  # fmt: skip
    assert continuations.read(tmp_path) == [Written("list", "Count:\n", "a\u2028b\n…", "c")]
    continuations.keep(tmp_path, prompts, None, mine)
    assert continuations.read(tmp_path) == [Written("list", "Count:\n", None, "c")]
    for damage in (b"", b"\xff\n", b"[]\n", b"{\n", b'{"kind": 1, "prompt": 2}\n', b'"x"\n'):
        (tmp_path / GENERATION).write_bytes(damage)
        assert continuations.read(tmp_path) == []
    continuations.forget(tmp_path)
    continuations.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []
