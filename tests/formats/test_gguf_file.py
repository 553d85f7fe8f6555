"""GGUF files: transformers and llama.cpp's library read the model, its facts and its words."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.artifact import open_artifact
from compress.convert import convert
from compress.errors import CompressError
from compress.evaluation.stream import stream
from compress.formats import gguf, gguf_facts, gguf_file, gguf_words
from compress.formats.gguf_header import FILE
from tests.conftest import MakeTiny
from tests.test_convert import assert_same
from tests.test_pipeline import run, write_recipe

pytestmark = pytest.mark.usefixtures("verify_here")
WIDE = {"hidden_size": 256, "intermediate_size": 512}


def made(model: Path, words: Path, folder: Path, **step: Any) -> Path:
    run(write_recipe(folder, words, **{"fmt": "gguf", "group_size": 32, **step}), model, folder / "out")
    return folder / "out"


def facts(folder: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in GGUFReader(folder / FILE).fields.items()}


@pytest.mark.parametrize(
    ("family", "tied", "config", "step"),
    [
        ("llama", True, {}, {"scheme": "W4A16"}),
        ("llama", False, {"num_key_value_heads": 4}, {"scheme": "W4A16_ASYM", "method": "awq"}),
        ("mistral", False, {"sliding_window": None}, {"scheme": "W8A16", "group_size": None}),
        ("qwen2", False, {}, {"scheme": "W4A16"}),
        ("qwen3", True, {"head_dim": 128}, {"scheme": "W3A16"}),
        ("llama", False, WIDE, {"scheme": "Q4_K", "group_size": None, "group_fallback": []}),
        ("qwen2", True, WIDE, {"scheme": "Q6_K", "method": "rtn", "group_size": None, "group_fallback": []}),
    ],
)
def test_transformers_reads_the_same_model(
    family: str, tied: bool, config: dict[str, Any], step: dict[str, Any], tiny: MakeTiny, text: Path, tmp_path: Path
) -> None:
    """Its reader knows nothing of ours: it expands the blocks, and puts rows and names back, in its own way."""
    from transformers import AutoModelForCausalLM

    out = made(tiny(family, tied=tied, **config), text, tmp_path, **step)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(out, gguf_file=FILE, dtype=torch.float32).eval()
    tokens_1T = torch.arange(3, 67)[None]
    with torch.inference_mode():
        theirs_TV: Tensor = model(tokens_1T).logits[0]
    artifact = open_artifact(out)
    ours_TV = artifact.head()(stream(artifact, tokens_1T))[0]
    assert float((ours_TV - theirs_TV).norm() / ours_TV.norm()) < 1e-4


def test_what_the_file_says(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny("mistral", tied=False), tmp_path / "named")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = made(model, text, tmp_path, scheme="W4A16")
    said = facts(out)
    assert said["general.architecture"] == "llama"
    assert said["general.name"] == "named"
    assert said["general.file_type"] == 2  # mostly Q4_0
    assert said["llama.block_count"] == 2
    assert (said["llama.attention.head_count"], said["llama.attention.head_count_kv"]) == (4, 2)
    assert said["llama.attention.key_length"] == said["llama.rope.dimension_count"] == 16
    assert said["llama.context_length"] == 8  # the sliding window, which llama.cpp does not have
    assert said["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert said["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert said["tokenizer.ggml.model"] == "gpt2"
    assert said["tokenizer.ggml.pre"] == "gpt-2"
    assert len(said["tokenizer.ggml.tokens"]) == len(said["tokenizer.ggml.token_type"]) == 320
    assert said["tokenizer.ggml.tokens"][:3] == ["<s>", "</s>", "<pad>"]
    assert said["tokenizer.ggml.tokens"][-1] == "[PAD319]"  # rows of the embedding that no word has
    assert said["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]  # control, …, normal
    assert said["tokenizer.ggml.token_type"][-1] == 5  # unused
    assert (said["tokenizer.ggml.bos_token_id"], said["tokenizer.ggml.eos_token_id"]) == (0, 1)
    assert said["tokenizer.ggml.add_bos_token"] is True
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out / FILE).tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["blk.1.attn_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "BF16"
    assert [path.name for path in out.glob("*") if path.suffix in (".gguf", ".safetensors", ".tmp")] == ["model.gguf"]


def test_there_and_back(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """Symmetric codes go from safetensors to GGUF and back without a bit changed."""
    source = made(tiny("llama", tied=False, attention_bias=True), text, tmp_path, scheme="W4A16", fmt="gptq")
    there = convert(source, "gguf", tmp_path / "there", lambda *_: None).folder
    back = convert(there, "compressed-tensors", tmp_path / "back", lambda *_: None).folder
    assert_same(source, there)
    assert_same(source, back)
    assert not (back / FILE).exists()
    assert facts(there)["general.name"].startswith("llama-untied")


def test_an_offset_that_does_not_fit_is_not_converted(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    source = made(tiny("llama", tied=True), text, tmp_path, scheme="W4A16_ASYM", fmt="gptq")
    with pytest.raises(CompressError, match="would change a weight"):
        convert(source, "gguf", tmp_path / "there", lambda *_: None)


def test_a_file_that_is_not_whole(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    out = made(tiny("llama", tied=True), text, tmp_path, scheme="W4A16")
    path = out / FILE
    whole = path.read_bytes()
    for broken in (b"", b"GGUF", whole[:5000], whole[:-200], b"nothing of the kind" * 50):
        path.write_bytes(broken)
        with pytest.raises(CompressError, match=r"GGUF|tensors"):
            open_artifact(out)


LLAMA_3_SCALING = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama_3s_frequencies() -> None:
    """What llama.cpp divides by, against transformers' own frequencies."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model("llama", hidden_size=512, num_attention_heads=4, rope_parameters=LLAMA_3_SCALING)
    theirs_F, scaling = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert scaling == 1
    factors_F = gguf_facts.frequency_factors(config.to_dict())
    assert factors_F is not None
    plain_F = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(plain_F / factors_F, theirs_F, rtol=1e-5, atol=0)
    assert float(factors_F.min()) == 1
    assert float(factors_F.max()) == 8


GEMMA = {"num_hidden_layers": 6, "sliding_window": 64}


@pytest.mark.parametrize(
    ("family", "changed", "why"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "kind 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kind 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}}, "sets beta_fast"),
        ("llama", {"hidden_act": "gelu"}, "with silu, not gelu"),
        ("qwen2", {"use_sliding_window": True}, "sliding window"),
        ("qwen2", {"head_dim": 32}, "as wide as the model"),
        ("qwen2", {"rope_parameters": LLAMA_3_SCALING}, "kind 'llama3'"),
        ("qwen3", {"attention_bias": True}, "biases"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "every sixth"),
        ("gemma3_text", {"sliding_window_pattern": 3}, "every sixth"),
        ("gemma3_text", {"rope_local_base_freq": 5000.0}, "theta 5000"),
        ("gemma3_text", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_llama_cpp_does_not_compute(family: str, changed: dict[str, Any], why: str) -> None:
    from transformers import AutoConfig

    settings: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    settings |= GEMMA if family == "gemma3_text" else {}
    assert gguf.refuses(AutoConfig.for_model(family, **settings).to_dict(), None) is None
    assert why in str(gguf.refuses(AutoConfig.for_model(family, **{**settings, **changed}).to_dict(), None))


def test_the_plan_refuses_before_any_work(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"families llama, mistral, qwen2, qwen3, gemma3_text; formats that can"):
        made(tiny("opt", tied=True), text, tmp_path, scheme="W4A16")
    model = shutil.copytree(tiny("llama", tied=True), tmp_path / "odd")
    document = json.loads((model / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    (model / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CompressError, match=r"rules that llama.cpp has no name for"):
        made(model, text, tmp_path, scheme="W4A16")


# ---- words


def split(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer of Llama 3, Qwen 2 and Mistral Nemo, but for the pattern."""
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, {"type": "ByteLevel", "use_regex": False}]}


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_rules_by_which_text_is_cut() -> None:
    def rules(pre_tokenizer: dict[str, Any] | None, **model: Any) -> str | None:
        return gguf_words.rules({"pre_tokenizer": pre_tokenizer, "model": model})

    assert rules(split(LLAMA_3), ignore_merges=True) == "llama-bpe"
    assert rules(split(LLAMA_3)) is None  # llama.cpp would take whole words from the vocabulary
    assert rules(split(LLAMA_3.replace("{1,3}", ""))) == "qwen2"
    assert rules(split(LLAMA_3.replace("{1,3}", "")), ignore_merges=True) is None
    assert rules(split(LLAMA_3.replace("{1,3}", "{1,2}")), ignore_merges=True) is None
    removed = split(LLAMA_3)
    removed["pretokenizers"][0]["behavior"] = "Removed"
    assert rules(removed, ignore_merges=True) is None
    assert rules({"type": "ByteLevel", "use_regex": True}) == "gpt-2"
    assert rules({"type": "ByteLevel", "use_regex": False}) is None
    assert rules({"type": "ByteLevel", "use_regex": True, "add_prefix_space": True}) is None
    digits = {"type": "Digits", "individual_digits": True}
    both = {"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel", "use_regex": True}]}
    assert rules(both) == "smollm"
    assert rules(None) is None


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "spaces"),
    [
        (REPLACE, AT_SPACES, False),  # Gemma
        ({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, None, True),  # Llama 2
        (None, META, True),
        (None, {**META, "prepend_scheme": "never"}, False),
        (None, {**META, "split": True}, None),
        (REPLACE, {"type": "Digits", "individual_digits": True}, None),
        ({"type": "Sequence", "normalizers": [{"type": "Lowercase"}, REPLACE]}, None, None),
        ({**REPLACE, "content": "_"}, None, None),
    ],
)
def test_words_that_were_sentencepieces(normalizer: Any, pre_tokenizer: Any, spaces: bool | None) -> None:
    document = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": {"byte_fallback": True}}
    assert gguf_words._spaces(document) is spaces
    assert gguf_words._spaces({**document, "model": {"byte_fallback": False}}) is None


def test_tokens_beyond_the_embedding_are_left_out(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """As Gemma's token of images, which only its larger models have a row for."""
    model = shutil.copytree(tiny("llama", tied=True), tmp_path / "model")
    document = json.loads((model / "tokenizer.json").read_text())
    extra = {"id": 320, "content": "<image>", "special": True, "lstrip": False, "rstrip": False, "single_word": False}
    document["added_tokens"].append({**extra, "normalized": False})
    (model / "tokenizer.json").write_text(json.dumps(document))
    out = made(model, text, tmp_path, scheme="W4A16")
    assert len(facts(out)["tokenizer.ggml.tokens"]) == 320
    document["added_tokens"][-1] |= {"id": 300, "lstrip": True}
    (model / "tokenizer.json").write_text(json.dumps(document))
    assert "swallows the spaces" in str(gguf_words.refusal(model))


def test_rotary_frequencies_of_old_checkpoints_are_left_out(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny("llama", tied=True), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = made(model, text, tmp_path, scheme="W4A16")
    assert not any("rotary" in name for name in gguf_file.contents(out / FILE))


def test_someones_gguf_file_is_no_model(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny("llama", tied=True), tmp_path / "model")
    (model / "model.safetensors").rename(model / FILE)
    with pytest.raises(CompressError, match="only there as GGUF"):
        made(model, text, tmp_path, scheme="W4A16")


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's way: of all neighbours whose union is a token, those of the highest score, the first of equals."""
    parts = list(text)
    while True:
        unions = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best = max(((score, i) for score, i in unions if score is not None), default=None)
        if best is None:
            return parts
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_scores_join_what_merges_join() -> None:
    """A trained BPE tokenizer, cut by its merges, and by the scores that the file would have."""
    from tokenizers import Tokenizer, models, trainers

    words = [
        f"{a}{b}{c}" for a in ("an", "ban", "can", "the") for b in ("ana", "nab", "cab") for c in ("s", "th", "an")
    ]
    backend = Tokenizer(models.BPE())
    backend.train_from_iterator(words * 3, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    found = gguf_words._scores(model, tokens)
    made_by_merges = {"".join(pair) for pair in model["merges"]}
    scores = {token: score for token, score in zip(tokens, found, strict=True) if token in made_by_merges}
    assert len(scores) > 20
    for text in [*words, "theanabans", "canacanabth"]:
        assert joined_by_score(text, scores) == backend.encode(text).tokens
