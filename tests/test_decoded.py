"""GGUF files of other tools: their weights as their own library reads them, measured, or refused in time."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MakeTiny
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import cli, decoded, pipeline
from compress.artifact import open_artifact
from compress.comparison import compare
from compress.errors import CompressError
from compress.evaluation import draw, speed
from compress.evaluation.metrics import row
from compress.evaluation.stream import stream
from compress.evaluation.text import MISSING
from compress.evaluation.worker import measure_fidelity
from compress.formats import gguf_facts, gguf_values
from compress.judge import judge
from compress.models import source
from compress.runtimes.hf import HfRuntime
from tests.formats.gguf_example import Kinds, mixture, only, write_file
from tests.test_judge import SUITE, here, inline, nothing, subjects  # noqa: F401  # fixtures

pytestmark = pytest.mark.usefixtures("inline")
WIDE = {"hidden_size": 256, "intermediate_size": 512}
TEXT = SUITE.split("accuracy", maxsplit=1)[0]
OWN = """version: 1
summary: eight bits
steps: [{method: rtn, scheme: W8A16, group_size: 32}]
format: gguf
evaluate: {suite: suite.yaml}
"""


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and know nothing of where numbers come from."""
    monkeypatch.setattr(draw, "draw", lambda document, home: None)


def base(model: Path) -> source.Source:
    return source.resolve(str(model), weights=True)


def in_folder(file: Path, model: Path) -> dict[str, Tensor]:
    found = decoded.decoded(file, base(model), nothing)
    assert found.path is not None
    return load_file(found.path / "model.safetensors")


def divergence(file: Path, model: Path) -> float:
    """The mean divergence from the base, on a few windows; without a report around it."""
    found = decoded.decoded(file, base(model), nothing).path
    assert found is not None
    tokens = torch.arange(3, 131).view(4, 32).tolist()
    conditions = {"runtime": "stream"}
    rows = measure_fidelity(
        model, found, tokens, task="text", conditions=conditions, threads=1, progress=lambda *_: None
    )  # fmt: skip
    return float(next(row["value"] for row in rows if row["metric"] == "kld_mean"))


def values(row: Mapping[str, Any]) -> tuple[str, str, float]:
    return row["metric"], row["subject"], row["value"]


# ---- the weights


@pytest.mark.parametrize(
    ("family", "tied", "config", "kinds"),
    [
        ("llama", False, {**WIDE, "attention_bias": True}, mixture),
        ("llama", True, WIDE, mixture),
        ("qwen2", False, {}, only("Q4_0")),
        (
            "gemma3_text", True,
            {"sliding_window": 64, "layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
            only("Q8_0"),
        ),
    ],
)  # fmt: skip
def test_the_weights_are_those_of_the_file(
    family: str, tied: bool, config: dict[str, Any], kinds: Kinds, tiny: MakeTiny, tmp_path: Path
) -> None:
    model = tiny(family, tied=tied, **config)
    expected = write_file(model, tmp_path / "m.gguf", kinds)
    found = in_folder(tmp_path / "m.gguf", model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor), name
    kept = {name: found[name].dtype for name in found if kinds(name) in ("F16", "BF16")}
    assert set(kept.values()) == ({torch.float16, torch.bfloat16} if kinds is mixture else set())


def test_transformers_and_we_compute_the_same_of_it(tiny: MakeTiny, tmp_path: Path) -> None:
    """Perplexity comes from one and accuracy from the other; the folder mixes three dtypes."""
    model, tokens_1T = tiny("llama", tied=False, **WIDE), torch.arange(3, 67)[None]
    write_file(model, tmp_path / "m.gguf", mixture)
    folder = decoded.decoded(tmp_path / "m.gguf", base(model), nothing).path
    assert folder is not None
    runtime = HfRuntime()
    runtime.load(folder, threads=1, dtype="float32")
    streamed = open_artifact(folder)
    torch.testing.assert_close(streamed.head()(stream(streamed, tokens_1T)), runtime.logits(tokens_1T))


def test_decoded_some_rows_at_a_time(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", tied=False, **WIDE)
    write_file(model, tmp_path / "m.gguf", mixture)
    whole = in_folder(tmp_path / "m.gguf", model)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(gguf_values, "_ROWS", 3 * 256)
    pieces = in_folder(tmp_path / "m.gguf", model)
    assert all(torch.equal(tensor, pieces[name]) for name, tensor in whole.items())


def test_a_head_of_its_own_in_a_file_of_a_tied_model(tiny: MakeTiny, tmp_path: Path) -> None:
    """Quantizers may code the head otherwise than the embedding that it was tied to."""
    model = tiny("llama", tied=True)
    write_file(
        model, tmp_path / "m.gguf", lambda name: "F16" if "lm_head" in name else only("Q8_0")(name),
        spoil=lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}),
    )  # fmt: skip
    found = decoded.decoded(tmp_path / "m.gguf", base(model), nothing)
    assert found.config["tie_word_embeddings"] is False
    assert divergence(tmp_path / "m.gguf", model) > 1e-3


# ---- what is measured


def test_a_file_is_measured_like_any_checkpoint(
    tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama", tied=False, **WIDE)
    write_file(model, tmp_path / "mine-Q8_0.gguf", only("Q8_0"))
    Path("suite.yaml").write_text(TEXT + "speed: [{batch: 1, context: 8, output: 2}]\n")
    outcome = judge("mine-Q8_0.gguf", suite="suite.yaml", against=str(model), progress=nothing)
    about, rows = outcome.report["artifact"], outcome.report["measurements"]
    assert outcome.folder == Path("evaluations") / f"mine-Q8_0--vs--{model.name}"
    assert (about["name"], about["format"]) == ("mine-Q8_0", "gguf")
    assert about["scheme"] == ["Q8_0 (16 tensors)", "F32 (5 tensors)"]
    assert any("8 bits" in note for note in about["notes"])
    assert any("speed and memory not measured" in note for note in about["notes"])
    assert ("size_bytes", "artifact", Path("mine-Q8_0.gguf").stat().st_size) in map(values, rows)
    assert ("bpw", "artifact", 8.5) in map(values, rows)
    assert {r["task"] for r in rows}.isdisjoint({"speed"})
    assert subjects(outcome.report) >= {("perplexity", "base"), ("perplexity", "artifact"), ("top1_agreement", "pair")}
    assert 1e-8 < next(value for metric, _, value in map(values, rows) if metric == "kld_mean") < 1e-3

    monkeypatch.setattr(decoded, "write_made", None)  # it is made once
    capsys.readouterr()
    command = ["eval", "mine-Q8_0.gguf", "--against", str(model), "--suite", "suite.yaml"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "Q8_0 (16 tensors)" in said


def test_worse_codes_are_further_from_the_base(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=False, **WIDE)
    kinds = ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q2_K")
    for kind in kinds:
        write_file(model, tmp_path / f"{kind}.gguf", only(kind))
    found = [divergence(tmp_path / f"{kind}.gguf", model) for kind in kinds]
    assert found[0] < 1e-9
    assert found == sorted(found)


def test_beside_an_artifact_of_ours(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact's own file, given as anyone's, is as far from the base as the artifact; but it has no speed."""
    model = tiny("llama", tied=True)
    timed = [row("decode_tok_s", subject, "speed", 9.0) for subject in ("base", "artifact")]
    monkeypatch.setattr(speed, "measure", lambda *_, **__: timed)
    Path("suite.yaml").write_text(TEXT + "speed: [{batch: 1, context: 8, output: 2}]\n")
    Path("own.yaml").write_text(OWN)
    pipeline.run("own.yaml", str(model), Path("own"), evaluate=False, progress=nothing)
    write_file(model, tmp_path / "theirs.gguf", only("Q8_0"))
    shutil.copyfile("own/model.gguf", "copied.gguf")
    targets = ["theirs.gguf", "copied.gguf", "own"]
    found = compare(targets, suite="suite.yaml", against=str(model), out=None, force=False, progress=nothing)
    assert found.table.differences == []
    cells = {name: dict(zip(found.table.heads, cells, strict=True)) for name, cells, _ in found.table.lines}
    assert [name for name, _, _ in found.table.lines[1:]] == ["theirs", "copied", "own"]
    kld = {name: float(cell["KLD"].value) for name, cell in cells.items() if cell["KLD"].value}
    assert kld["copied"] == pytest.approx(kld["own"], rel=1e-2)
    assert 0 < kld["theirs"] < 1e-3
    speeds = {name: cell["tok/s"].value for name, cell in cells.items()}
    assert speeds == {model.name: "9.00", "theirs": MISSING, "copied": MISSING, "own": "9.00"}


# ---- what is refused, before anything is made


def without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.pop(name)[:0].sum()


def beside(**tensors: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda found: found.update({name.replace("__", "."): value for name, value in tensors.items()})


SMALL = np.ones((320, 32), np.float32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fewer blocks": ({"facts": {"block_count": 1}}, r"llama\.block_count is 1, the base's 2"),
    "more blocks": ({"facts": {"block_count": 1 << 31}}, r"block_count is 2147483648, the base's 2"),
    "no blocks": ({"facts": {"block_count": None}}, r"does not say llama\.block_count"),
    "other heads": ({"facts": {"attention.head_count": 8}}, r"head_count is 8, the base's 4"),
    "other key heads": ({"facts": {"attention.head_count_kv": None}}, r"head_count_kv is 4, the base's 2"),
    "key heads by block": ({"facts": {"attention.head_count_kv": [2, 2]}}, r"head_count_kv is 4, the base's 2"),
    "another width": ({"facts": {"feed_forward_length": 256}}, r"feed_forward_length is 256, the base's 128"),
    "another theta": ({"facts": {"rope.freq_base": 5e5}}, r"rope\.freq_base is 500000\.0, the base's 10000\.0"),
    "another scaling": ({"facts": {"rope.scaling.type": "yarn"}}, r"rope\.scaling\.type is yarn, the base's none"),
    "another epsilon": ({"facts": {"attention.layer_norm_rms_epsilon": 1e-5}}, "rms_epsilon is"),
    "another vocabulary": ({"facts": {"vocab_size": 321}}, r"vocab_size is 321, the base's 320"),
    "factors": ({"spoil": beside(rope_freqs__weight=np.ones(8, np.float32))}, "it has rope_freqs.weight"),
    "a part": ({"facts": {"split.count": 3}}, "one of 3 parts"),
    "a tensor less": ({"spoil": without("model.norm.weight")}, r"model\.norm\.weight is missing"),
    "a tensor of none": ({"spoil": beside(what__weight=SMALL)}, r"what\.weight is not known"),
    "a tensor more": ({"spoil": beside(model__norm__bias=SMALL)}, r"model\.norm\.bias is unknown"),
    "a tensor of another shape": (
        {"spoil": beside(model__embed_tokens__weight=SMALL)}, r"embed_tokens\.weight is \[320, 32\], in the base"
    ),
    "a head less": ({"spoil": without("lm_head.weight")}, r"lm_head\.weight is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_another_model(case: str, tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=False)
    options, why = WRONG[case]
    write_file(model, tmp_path / "m.gguf", only("F32"), **options)
    with pytest.raises(CompressError, match=why) as caught:
        decoded.check(tmp_path / "m.gguf", base(model))
    assert caught.value.hint or case == "a tensor of none"
    assert "m.gguf" in str(caught.value.where)


@pytest.mark.parametrize(
    ("family", "config", "why"),
    [
        ("qwen2", {}, "architecture is 'llama', the base's 'qwen2'"),
        ("llama", {"layers": 3}, "block_count is 2, the base's 3"),
        ("llama", {"vocab_size": 384}, "vocab_size is 320, the base's 384"),
        ("opt", {}, "families llama, mistral, qwen2, qwen3, gemma3_text, and the base is 'opt'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "kind 'dynamic'"),
    ],
)
def test_another_base(family: str, config: dict[str, Any], why: str, tiny: MakeTiny, tmp_path: Path) -> None:
    write_file(tiny("llama", tied=True), tmp_path / "m.gguf", only("Q8_0"))
    with pytest.raises(CompressError, match=why):
        judge("m.gguf", against=str(tiny(family, tied=True, **config)), progress=nothing)
    assert not Path("evaluations").exists()
    assert not (tmp_path / "cache" / "gguf").exists()


LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip


def test_llama_3s_factors(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=True, rope_parameters=LLAMA_3)
    factors_F = gguf_facts.frequency_factors(json.loads((model / "config.json").read_text()))
    assert factors_F is not None
    for factors, why in ((factors_F, None), (factors_F + 1, "other values"), (None, "it has no rope_freqs")):
        extra = {} if factors is None else {"rope_freqs__weight": factors.numpy()}
        write_file(model, tmp_path / "m.gguf", only("Q8_0"), spoil=beside(**extra))
        if why is None:
            decoded.check(tmp_path / "m.gguf", base(model))
        else:
            with pytest.raises(CompressError, match=why):
                decoded.check(tmp_path / "m.gguf", base(model))


def test_a_file_that_is_not_whole(tiny: MakeTiny, tmp_path: Path) -> None:
    model, path = tiny("llama", tied=True), tmp_path / "m.gguf"
    write_file(model, path, only("Q8_0"))
    whole = path.read_bytes()
    odd = whole.replace(b"blk.0.attn_q.weight" + (2).to_bytes(4, "little"), b"blk.0.attn_q.weight" + bytes(4))
    for broken in (b"", b"GGUF", whole[:300], whole[:-500], whole[:4] + b"\0\0\0\3" + whole[8:], odd):
        path.write_bytes(broken)
        with pytest.raises(CompressError, match=r"GGUF|tensors|blocks") as caught:
            judge("m.gguf", against=str(model), progress=nothing)
        assert "m.gguf" in str(caught.value.where)
    assert not Path("evaluations").exists()


@pytest.mark.parametrize(("number", "why"), [(99, "number 99"), (9, "type Q8_1 are not decoded"), (24, "type I8 are")])
def test_types_that_are_not_decoded(number: int, why: str, tiny: MakeTiny, tmp_path: Path) -> None:
    model, path = tiny("llama", tied=True), tmp_path / "m.gguf"
    write_file(model, path, only("Q8_0"))
    whole = path.read_bytes()
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    assert whole[at : at + 4] == (8).to_bytes(4, "little")
    path.write_bytes(whole[:at] + number.to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(CompressError, match=why):
        decoded.check(path, base(model))


def test_a_file_alone(tiny: MakeTiny, tmp_path: Path) -> None:
    write_file(tiny("llama", tied=True), tmp_path / "m.gguf", only("Q8_0"))
    with pytest.raises(CompressError, match="beside the model that it was made from") as caught:
        judge("m.gguf", progress=nothing)
    assert "--against" in str(caught.value.hint)
    with pytest.raises(CompressError, match="no such file"):
        judge("n.gguf", against="nowhere", progress=nothing)
    with pytest.raises(CompressError, match="this is a file"):  # as a base, or to compress
        judge(str(tiny("llama", tied=True)), against="m.gguf", progress=nothing)


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_values_that_are_not_finite(kind: str, tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("llama", tied=True)
    write_file(model, tmp_path / "m.gguf", only(kind))
    at = next(t.data_offset for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.attn_v.weight")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :])  # no number in either
    with pytest.raises(CompressError, match="not finite"):
        decoded.decoded(tmp_path / "m.gguf", base(model), nothing)
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "gguf").iterdir())


def test_a_disk_that_is_full(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", tied=True)
    write_file(model, tmp_path / "m.gguf", only("Q8_0"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(CompressError, match="on the disk, and 0 B are free"):
        decoded.decoded(tmp_path / "m.gguf", base(model), nothing)
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "gguf").iterdir())


def test_the_base_may_be_quantized_itself(tiny: MakeTiny, tmp_path: Path) -> None:
    """Its config's words on that are not the file's."""
    model = tmp_path / "base"
    shutil.copytree(tiny("llama", tied=True), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    save_file(load_file(model / "model.safetensors"), model / "model.safetensors")
    write_file(model, tmp_path / "m.gguf", only("Q8_0"))
    found = decoded.decoded(tmp_path / "m.gguf", base(model), nothing)
    assert "quantization_config" not in found.config
