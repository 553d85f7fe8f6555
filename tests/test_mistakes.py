"""Mistakes: one clear error before any work, exit code 2, no traceback, nothing written. One table holds them all.

Every case begins with a folder in which the same command would be fine; its scene then spoils one thing.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTiny, byte_tokenizer

from compress import cli
from compress.evaluation import memory
from compress.formats import FORMATS
from compress.models import FAMILIES, hub_files
from compress.recipe import recipe_names

RECIPE = """version: 1
summary: eight bits
steps:
  - method: gptq
    scheme: W8A16
calibration:
  dataset: file:words.txt
  samples: 4
  seq_len: 32
format: compressed-tensors
evaluate: {suite: small.yaml}
"""
SUITE = "version: 1\nsummary: small\ntext:\n  dataset: file:words.txt\n  windows: 2\n  seq_len: 32\n"
WORDS = " ".join(f"word {i}" for i in range(400))
PLAN, RUN = "plan mine.yaml --model model", "run mine.yaml --model model"
NEEDED = f"{(4 + 4) * 32}"  # tokens that the recipe's samples and the held-out windows take
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Scene:
    """A folder in which `plan mine.yaml --model model` is fine, to be spoiled."""

    root: Path
    patch: pytest.MonkeyPatch

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def weights(self) -> Path:
        return self.model / "model.safetensors"

    def write(self, name: str, content: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def swap(self, old: str, new: str, name: str = "mine.yaml") -> None:
        """Writes `new` for `old` in a file."""
        text = (self.root / name).read_text()
        assert text.count(old) == 1, (name, old)
        self.write(name, text.replace(old, new))

    def add(self, text: str, name: str = "mine.yaml") -> None:
        self.write(name, (self.root / name).read_text() + text)

    def config(self, **changes: Any) -> None:
        """Changes keys of the model's config; None takes one away."""
        config = {**json.loads((self.model / "config.json").read_text()), **changes}
        kept = {key: value for key, value in config.items() if value is not None}
        self.write("model/config.json", json.dumps(kept))

    def drop(self, *names: str) -> None:
        for name in names:
            (self.root / name).unlink()

    def cut(self, size: int) -> None:
        self.write("model/model.safetensors", self.weights.read_bytes()[:size])

    def header(self, tensor: str, **changes: Any) -> None:
        """Changes what the header of the weights says of a tensor."""
        raw = self.weights.read_bytes()
        end = 8 + struct.unpack("<Q", raw[:8])[0]
        said = json.loads(raw[8:end])
        said[tensor] |= changes
        new = json.dumps(said).encode()
        self.weights.write_bytes(struct.pack("<Q", len(new)) + new + raw[end:])

    def tensors(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes the tensors of the model's weights."""
        from safetensors.torch import load_file, save_file

        tensors = load_file(self.weights)
        change(tensors)
        save_file(tensors, self.weights, metadata={"format": "pt"})

    def pickled(self) -> None:
        """The same weights as a pickle alone, as older checkpoints have them."""
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(self.weights), self.model / "pytorch_model.bin")
        self.drop("model/model.safetensors")

    def sharded(self) -> None:
        """An index that names two shards, of which one is there."""
        from safetensors.torch import load_file

        files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        table = {name: files["layers.1." in name] for name in load_file(self.weights)}
        self.weights.rename(self.model / files[0])
        self.write("model/model.safetensors.index.json", json.dumps({"weight_map": table}))

    def other_words(self) -> None:
        """A tokenizer with more tokens than the model has embeddings."""
        words = byte_tokenizer()
        words.add_tokens([f"filler {i}" for i in range(100)] + ["word"])
        words.save_pretrained(self.model)

    def rows(self, *lines: str) -> None:
        """Another calibration set, of JSON lines."""
        self.swap("words.txt", "rows.jsonl")
        self.write("rows.jsonl", "\n".join(lines))

    def readonly(self, folder: str) -> None:
        """Says that nothing can be written in a folder; the superuser's rights would hide it."""
        real, shut = os.access, self.root / folder
        shut.mkdir()
        self.patch.setattr(os, "access", lambda path, mode: Path(path).absolute() != shut and real(path, mode))


def nothing(scene: Scene) -> None:
    """The command line itself is the mistake."""


@dataclass(frozen=True)
class Mistake:
    """What spoils the scene, the command lines that must find it, the words that their message must have.

    A refused plan is shown all the same: `shown`.
    """

    spoil: Callable[[Scene], object]
    words: tuple[str, ...]
    lines: tuple[str, ...] = (PLAN, RUN)
    shown: bool = False


def yaml(old: str, new: str, *words: str) -> Mistake:
    """The recipe with one thing written otherwise."""
    return Mistake(lambda s: s.swap(old, new), words)


def text(content: str | bytes, *words: str) -> Mistake:
    """Another text as the recipe."""
    return Mistake(lambda s: s.write("mine.yaml", content), words)


def line(arguments: str, *words: str, spoil: Callable[[Scene], object] = nothing) -> Mistake:
    return Mistake(spoil, words, (arguments,))


def model(spoil: Callable[[Scene], object], *words: str) -> Mistake:
    return Mistake(spoil, words)


def refused(old: str, new: str, *words: str) -> Mistake:
    """A recipe that is right in itself and does not go with the model."""
    return Mistake(lambda s: s.swap(old, new), ("mine.yaml", *words), shown=True)


def run(arguments: str, *words: str, spoil: Callable[[Scene], object] = nothing) -> Mistake:
    return Mistake(spoil, words, (f"{RUN} {arguments}".strip(),))


def questions(tasks: str, *words: str) -> Mistake:
    """A suite that asks questions."""
    return Mistake(lambda s: s.write("small.yaml", f"{SUITE}accuracy: {tasks}\n"), words)


RECIPES = {
    "an unknown recipe": line(
        "plan gptq-4bits --model model", "unknown recipe 'gptq-4bits'", "did you mean 'gptq-4bit'", *recipe_names()
    ),
    "an unknown recipe to run": line("run rtn4bit --model model", "did you mean 'rtn-4bit'"),
    "a missing recipe file": line("run ./no.yaml --model model", "no recipe file './no.yaml'", "gptq-4bit"),
    "a folder for a recipe": line("plan model --model model", "'model' is a folder, not a recipe"),
    "weights for a recipe": line("plan model/model.safetensors --model model", "not UTF-8|not a recipe", "YAML file"),
    "an unknown key": yaml("format:", "formt:", "'formt'", "did you mean 'format'", r"mine\.yaml:10 \(formt\)"),
    "an unknown key of a step": yaml(
        "  - method", "  - group_sise: 8\n    method", "'group_sise'", "did you mean 'group_size'", r"mine\.yaml:4"
    ),
    "an unknown key of the calibration": yaml("samples", "sampels", "'sampels'", "'samples'", r"mine\.yaml:8"),
    "an unknown method": yaml("gptq", "gtpq", "unknown method 'gtpq'", "did you mean 'gptq'", "rtn", r"mine\.yaml:4"),
    "an unknown scheme": yaml("W8A16", "w4a61", "unknown scheme 'w4a61'", "did you mean 'W4A16'", r"mine\.yaml:5"),
    "an unknown scheme of an override": yaml(
        "W8A16\n", "W8A16\n    overrides: [{match: '*', scheme: W8A61}]\n", "'W8A61'", "W8A16", r"mine\.yaml:6"
    ),
    "an unknown format": yaml(
        "compressed-tensors", "awqq", "unknown format 'awqq'", *FORMATS, r"mine\.yaml:10 \(format\)"
    ),
    "an unknown data set": yaml(
        "file:words.txt", "wikitext", "unknown dataset 'wikitext'", "did you mean 'wikitext2'", r"mine\.yaml:7",
    ),
    "no steps": yaml("steps:\n  - method: gptq\n    scheme: W8A16\n", "", "`steps`", r"mine\.yaml:1"),
    "two methods that code the weights": yaml(
        "    scheme: W8A16\n", "    scheme: W8A16\n  - {method: rtn, scheme: W4A16}\n",
        "gptq and rtn", "coded once", "overrides", r"mine\.yaml:3 \(steps\)",
    ),
    "another version": yaml("version: 1", "version: 2", "version", r"\(got 2\)", r"mine\.yaml:1"),
}  # fmt: skip

SYNTAX = {
    "an empty recipe": text("", "mapping of keys to values, found nothing", r"mine\.yaml"),
    "a list": text("- method: gptq\n", "mapping of keys to values, found a list", r"mine\.yaml"),
    "an open bracket": yaml("scheme: W8A16", "scheme: [W8A16", "not valid YAML", r"mine\.yaml:\d"),
    "a tab": yaml("    scheme", "\tscheme", "not valid YAML", r"'\\t'", r"mine\.yaml:5"),
    "a key that appears twice": yaml("format:", "summary:", "'summary' appears twice", "line 2", r"mine\.yaml:10"),
    "a tag that would run code": yaml(
        "eight bits", "!!python/object/apply:os.system ['touch ran']",
        "!!python/object/apply:os.system", "nothing of it was run", r"mine\.yaml:2",
    ),
    "a tag that would make an object": yaml("eight bits", "!!python/name:os.system", "os.system", r"mine\.yaml:2"),
    "a document inside itself": yaml("eight bits", "&all [*all]", "holds itself", r"mine\.yaml:2"),
    "aliases that multiply": text(
        BOMB + RECIPE.replace("eight bits", "*i"), "aliases", "multiply to more than 10,000", r"mine\.yaml"
    ),
    "brackets without end": text("[" * 5000, "nested too deeply", r"mine\.yaml"),
    "a date that is none": yaml("eight bits", "2024-13-45", "not valid YAML", r"mine\.yaml"),
    "another encoding": text(RECIPE.replace("eight", "für acht").encode("latin-1"), "not UTF-8", r"mine\.yaml:2"),
}  # fmt: skip

RANGES = {
    "no samples": yaml("samples: 4", "samples: 0", "samples", "at least 1", "got 0", r"mine\.yaml:8"),
    "yes for a number": yaml("samples: 4", "samples: yes", "samples", "integer", "got True", r"mine\.yaml:8"),
    "short windows": yaml("seq_len: 32", "seq_len: 4", "seq_len", "at least 8", "got 4", r"mine\.yaml:9"),
    "a negative seed": yaml("samples: 4", "seed: -1", "seed", "at least 0", "got -1", r"mine\.yaml:8"),
    "negative damping": yaml("W8A16", "W8A16\n    damping: -1", "damping", "more than 0 and at most 1", r"yaml:6"),
    "too small a group": yaml("W8A16", "W8A16\n    group_size: 7", "group_size", "at least 8", r"mine\.yaml:6"),
    "nine bits": yaml("W8A16", "{weights: {num_bits: 9}}", "num_bits", "at most 8", "got 9", r"mine\.yaml:5"),
    "delta": yaml("{suite: small.yaml}", "{delta: 2}", "delta", "more than 0 and less than 1", r"mine\.yaml:11"),
    "one pattern for a list": yaml("W8A16", "W8A16\n    ignore: lm_head", "ignore", "list", r"mine\.yaml:6"),
    "an option without a sample": run("--samples 0", "samples", "at least 1", "where: --samples"),
    "an option's short windows": line(f"{PLAN} --seq-len 4", "seq_len", "at least 8", "where: --seq-len"),
    "an option's format": line(f"{PLAN} --format awqq", "unknown format 'awqq'", *FORMATS, "where: --format"),
    "an option's data set": run("--dataset wikitext", "'wikitext'", "did you mean 'wikitext2'", "where: --dataset"),
    "an option's samples, too many": run("--samples 900", "too short", "3,490 tokens", "where: mine.yaml:6"),
    "another device": run("--device gpu", "'gpu'", "cpu", "--device"),
    "no threads": run("--threads 0", "--threads", "from 1 to", "not 0"),
}  # fmt: skip

REFUSED = {
    "a group that divides nothing": refused(
        "W8A16", "W4A16\n    group_size: 96", "group_size 96 does not divide", r"q_proj", r"\[64, 32, 16\]"
    ),
    "a pattern that matches nothing": refused(
        "W8A16", "W8A16\n    ignore: ['*.mlp.dwn_proj', lm_head]", r"'\*\.mlp\.dwn_proj' matches no weight",
        "did you mean 'mlp.down_proj'",
    ),
    "an override that matches nothing": refused(
        "W8A16", "W8A16\n    overrides: [{match: k_prj, scheme: W4A16}]", "'k_prj'", "did you mean 'k_proj'"
    ),
    "a tied head": refused("W8A16", "W8A16\n    ignore: []", "lm_head", "the embedding's", "`ignore`"),
    "nothing to quantize": refused("W8A16", "W8A16\n    ignore: ['*']", "no weight would be quantized"),
    "a scheme that the format does not hold": refused(
        "W8A16", "{weights: {num_bits: 8, strategy: tensor}}", "compressed-tensors cannot hold int8 sym tensor",
        "formats that can: dense",
    ),
    "activations that the format has no words for": Mistake(
        lambda s: (s.swap("W8A16", "W8A8"), s.swap("format: compressed-tensors", "format: dense")),
        ("mine.yaml", r"dense cannot hold int8 sym channel \+ act int8 token", "formats that can: compressed-tensors"),
        shown=True,
    ),
    "windows longer than the model": refused("seq_len: 32", "seq_len: 2048", "2048", "1024 positions"),
}  # fmt: skip

MODELS = {
    "an unknown alias": line("plan mine.yaml --model llama3-8", "'llama3-8'", "did you mean 'llama3-8b'", "org/name"),
    "a missing folder": line("run mine.yaml --model ./no/model", "no such folder", "no/model"),
    "a hub that is away": line(
        "run mine.yaml --model org/none", "org/none is not in the cache", "hub can't be reached", "--local-dir",
    ),
    "a file for a model": line(
        "plan mine.yaml --model model/model.safetensors", "this is a file", "folder", r"model\.safetensors"
    ),
    "a GGUF file": line(
        "run mine.yaml --model tiny.gguf", "this is a file", "GGUF", r"tiny\.gguf",
        spoil=lambda s: s.write("tiny.gguf", b"GGUF"),
    ),
    "no config": model(lambda s: s.drop("model/config.json"), "no config.json", "/model"),
    "a config that is not JSON": model(lambda s: s.write("model/config.json", '{"a": '), "not JSON", "config.json"),
    "a config that is a list": model(lambda s: s.write("model/config.json", "[]"), "not an object", "config.json"),
    "a config without a type": model(lambda s: s.config(model_type=None), "`model_type`", "config.json"),
    "a config of no model": model(lambda s: s.config(num_attention_heads=0), "does not describe a model", "/model"),
    "a misspelt family": model(
        lambda s: s.config(model_type="lama"), "unknown model family 'lama'", "did you mean 'llama'", *FAMILIES
    ),
    "another family": model(lambda s: s.config(model_type="mixtral"), "'mixtral'", "not supported", *FAMILIES),
    "code that comes with the model": model(
        lambda s: s.config(model_type="internlm2", auto_map={"AutoModel": "m.M"}), "'internlm2'", "never run", *FAMILIES
    ),
    "an encoder": model(lambda s: s.config(model_type="bert"), "'bert' is an encoder", "decoder-only", *FAMILIES),
    "an encoder–decoder": model(lambda s: s.config(model_type="t5"), "'t5' is an encoder–decoder", *FAMILIES),
    "a vision model": model(lambda s: s.config(model_type="vit"), "'vit' is a vision model", *FAMILIES),
    "a speech model": model(lambda s: s.config(model_type="whisper"), "'whisper' is a speech", *FAMILIES),
    "a multimodal model": model(
        lambda s: s.config(model_type="gemma3", vision_config={}, text_config={"model_type": "gemma3_text"}),
        "'gemma3' is a multimodal model", "text part", "gemma3_text",
    ),
    "a classifier": model(
        lambda s: s.config(architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification is no language model", "ForCausalLM",
    ),
    "a model that is quantized": model(
        lambda s: s.config(quantization_config={"quant_method": "gptq"}), "quantized already", "gptq", "original"
    ),
    "no weights": model(lambda s: s.drop("model/model.safetensors"), "no weights", "model.safetensors", "/model"),
    "a pickle alone": model(
        lambda s: s.pickled(), r"pytorch_model\.bin", "run code", "python -c", "save_pretrained", "-safetensors"
    ),
    "an adapter alone": model(
        lambda s: s.weights.rename(s.model / "adapter_model.safetensors"), "adapter", "merge_and_unload"
    ),
    "weights as GGUF alone": model(lambda s: s.weights.rename(s.model / "m.gguf"), "GGUF", "original"),
    "a truncated file": model(lambda s: s.cut(20_000), "20000 bytes", "promises", r"model\.safetensors", "again"),
    "a file that ends in its header": model(lambda s: s.cut(100), "cut off", r"model\.safetensors"),
    "a header of garbage": model(
        lambda s: s.write("model/model.safetensors", struct.pack("<Q", 64) + b"\xff" * 640),
        "header is damaged", r"model\.safetensors",
    ),
    "a header that contradicts itself": model(
        lambda s: s.header("model.norm.weight", shape=[65]), "header is damaged", "shape", r"model\.safetensors"
    ),
    "a pointer for weights": model(
        lambda s: s.write("model/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"
    ),
    "a missing shard": model(lambda s: s.sharded(), "model-00002-of-00002.safetensors is missing", "/model"),
    "a tensor of another shape": model(
        lambda s: s.tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:3]})),
        r"model\.norm\.weight is \[3\]", r"\[64\]", "/model",
    ),
    "a tensor that is missing": model(
        lambda s: s.tensors(lambda t: t.pop("model.norm.weight")), r"model\.norm\.weight is missing", "/model"
    ),
    "no tokenizer": model(
        lambda s: s.drop("model/tokenizer.json", "model/tokenizer_config.json"), "tokenizer", "tokenizer.json", "/model"
    ),
    "a broken tokenizer": model(lambda s: s.write("model/tokenizer.json", '{"version": '), "tokenizer", "/model"),
    "a tokenizer that the library refuses": model(
        lambda s: s.write("model/tokenizer.json", '{"added_tokens": [], "model": {"type": "BPE", "vocab": 3}}'),
        "tokenizer cannot be loaded", "/model",
    ),
    "a broken generation config": model(
        lambda s: s.write("model/generation_config.json", '{"eos_token_id": '), "not JSON", r"generation_config\.json"
    ),
    "another model's tokenizer": model(
        lambda s: s.other_words(), r"gives token \d+", "vocabulary has 320", "another model's", "/model"
    ),
}  # fmt: skip

DATA = {
    "a missing text": yaml("file:words.txt", "file:no.txt", r"no\.txt", "No such file", r"mine\.yaml:7"),
    "an empty text": model(lambda s: s.write("words.txt", " \n"), r"words\.txt is empty", r"mine\.yaml:7"),
    "a folder for a text": yaml("file:words.txt", "file:model", "Is a directory", r"mine\.yaml:7"),
    "a text in another encoding": model(
        lambda s: s.write("words.txt", "für".encode("latin-1") * 900), "not UTF-8", r"words\.txt", "iconv"
    ),
    "a line that is not JSON": model(
        lambda s: s.rows('{"text": "a"}', '{"text"'), "not JSON", r"rows\.jsonl:2"
    ),
    "rows without text": model(
        lambda s: s.rows('{"body": "a"}'), "no `text`", "body", r"rows\.jsonl:1"
    ),
    "a text that is too short": model(
        lambda s: s.write("words.txt", "word " * 30), "too short", "151 tokens", NEEDED, "samples", "seq_len: 18",
        r"mine\.yaml:6 \(calibration\)",
    ),
    "a hub's set without the hub": yaml(
        "file:words.txt", "wikitext2", "'wikitext2'", "cannot be had", "embedded", r"mine\.yaml:7"
    ),
    "an unknown suite": line(
        f"{PLAN} --suite embeded", "unknown suite 'embeded'", "did you mean 'embedded'", "'embeded'"
    ),
    "an unknown suite of the recipe": yaml(
        "small.yaml", "embeded", "unknown suite", "did you mean 'embedded'", r"mine\.yaml:11"
    ),
    "a missing suite file": line(f"{RUN} --suite no/suite.yaml", "no suite file 'no/suite.yaml'", "embedded"),
    "a suite with a wrong key": model(
        lambda s: s.swap("windows", "window", "small.yaml"), "'window'", "did you mean 'windows'", r"small\.yaml:5"
    ),
    "a suite out of range": model(
        lambda s: s.swap("windows: 2", "windows: 0", "small.yaml"), "windows", "at least 1", r"small\.yaml:5"
    ),
    "a suite in another encoding": model(
        lambda s: s.write("small.yaml", SUITE.replace("small", "für").encode("latin-1")), "not UTF-8", r"small\.yaml:2"
    ),
    "a suite without its text": model(
        lambda s: s.swap("words.txt", "gone.txt", "small.yaml"), r"file:gone\.txt", r"suite small\.yaml"
    ),
    "a suite that is too long": model(
        lambda s: s.swap("windows: 2", "windows: 900", "small.yaml"), "900 windows of 32", r"28,800", "suite", "at most"
    ),
    "a suite of longer windows than the model": model(
        lambda s: s.swap("seq_len: 32", "seq_len: 2000", "small.yaml"), "2000", "1024 positions", "suite"
    ),
    "a suite with unknown prompts": model(
        lambda s: s.add("generation: {prompts: opening}\n", "small.yaml"), "'opening'", "did you mean 'openings'"
    ),
}  # fmt: skip

PLACES = {
    "a folder that holds something else": run(
        "--out mine", "holds something else", "mine", "--out", spoil=lambda s: s.write("mine/thesis.tex", "x")
    ),
    "a folder with another program's lock": run(
        "--out mine", "holds something else", "mine",
        spoil=lambda s: (s.write("mine/lock.json", "{}"), s.write("mine/thesis.tex", "x")),
    ),
    "a folder with another program's state": run(
        "--out mine", "holds something else", "mine", spoil=lambda s: s.write("mine/.state/database", "x")
    ),
    "a name that is too long": run(f"--out {'x' * 300}", "too long", "x" * 300),
    "a file for the output": run("--out mine.yaml", "a file, not a folder", r"mine\.yaml", "--out"),
    "an output below a file": run("--out mine.yaml/new/out", "below a file", r"mine\.yaml", "--out"),
    "the model for the output": run("--out model", "lies in the model's folder", "model", "--out"),
    "an output in the model": run("--out model/made/here", "lies in the model's folder", "--out"),
    "a link that leads nowhere": run(
        "--out link", "leads nowhere", "link", spoil=lambda s: (s.root / "link").symlink_to(s.root / "gone")
    ),
    "a folder that cannot be written": run(
        "--out shut/out", "nothing can be written in", "shut", "--out", spoil=lambda s: s.readonly("shut")
    ),
    "too little memory": run(
        "", r"needs about \d+ MB of memory", "100 MB are free", "samples",
        spoil=lambda s: s.patch.setattr(memory, "available_memory_bytes", lambda: 100_000_000),
    ),
    "too little disk": run(
        "--out made", r"\d+ kB of disk", "1.00 kB are free", "made", "--out",
        spoil=lambda s: s.patch.setattr(memory, "free_disk_bytes", lambda path: 1_000),
    ),
    "nothing to measure": line("eval ./nowhere", "no such folder", "/nowhere"),
    "an unknown suite to measure by": line("eval model --suite embeded", "'embeded'", "did you mean 'embedded'"),
    "a pickle to measure": line(
        "eval model --suite small.yaml", r"pytorch_model\.bin", "python -c", spoil=lambda s: s.pickled()
    ),
    "a folder of something else to measure into": line(
        "eval model --suite small.yaml --out mine", "holds something else", "mine",
        spoil=lambda s: s.write("mine/thesis.tex", "x"),
    ),
    "a suite whose text is away, to measure by": line(
        "eval model --suite small.yaml", r"words\.txt", "suite", spoil=lambda s: s.drop("words.txt")
    ),
    "no report": line("report nowhere", "report", r"nowhere/report\.json", "finished artifact"),
    "the report of a file": line("report mine.yaml", "report", r"mine\.yaml/report\.json"),
    "a report that is not JSON": line(
        "report made", "no JSON", r"made/report\.json", spoil=lambda s: s.write("made/report.json", "{")
    ),
    "a report of another version": line(
        "report made", "schema .*99", r"made/report\.json", "version",
        spoil=lambda s: s.write("made/report.json", '{"schema": 99}'),
    ),
}  # fmt: skip

QUESTIONS = {
    "an unknown metric": questions(
        "{tasks: [{task: everyday, metric: acc_nrom}]}", "unknown metric 'acc_nrom'", "did you mean 'acc_norm'",
        r"small\.yaml:7",
    ),
    "an unknown key of a task": questions(
        "{tasks: [{tsk: everyday}]}", "'tsk'", "did you mean 'task'", r"small\.yaml:7"
    ),
    "no tasks": questions("{tasks: []}", "tasks", "at least 1", r"small\.yaml:7"),
    "a task twice": questions("{tasks: [{task: everyday}, {task: everyday}]}", "'everyday' stands twice", "small"),
    "an unknown sample": questions(
        "{tasks: [{task: piqa}], sample: cor}", "unknown sample 'cor'", "did you mean 'core'", "small"
    ),
    "a sample of other tasks": questions(
        "{tasks: [{task: everyday}], sample: core}", "no document of task 'everyday'", r"core\.json"
    ),
    "a verdict without tasks": model(
        lambda s: s.write("small.yaml", SUITE + "basis: accuracy\n"), "acc or acc_norm", r"small\.yaml:7 \(basis\)"
    ),
    "a data folder that is none": run(
        "--suite core", "COMPRESS_DATA_DIR", "nowhere", "JSONL",
        spoil=lambda s: s.patch.setenv("COMPRESS_DATA_DIR", "nowhere"),
    ),
    "an option out of range": line(f"{PLAN} --samples 0", "samples", "at least 1", "--samples"),
    "an unknown format by an option": line(f"{RUN} --format gguff", "unknown format 'gguff'", "--format", *FORMATS),
    "an unknown data set by an option": line(f"{PLAN} --dataset wikitext", "did you mean 'wikitext2'", "--dataset"),
    "a device that is not there": run("--device cuda", "'cuda'", "--device", "CPU"),
    "a device to measure on": line("eval model --suite small.yaml --device cuda", "'cuda'", "--device", "CPU"),
}  # fmt: skip

TABLES = (RECIPES, SYNTAX, RANGES, REFUSED, MODELS, DATA, PLACES, QUESTIONS)
MISTAKES = {name: mistake for table in TABLES for name, mistake in table.items()}


@pytest.fixture
def scene(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """Offline, in a folder of its own, with a model, a recipe, a suite and their text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_files, "probe", lambda *args, **kwargs: OSError("no route"))
    shutil.copytree(tiny("llama", tied=True), tmp_path / "model")
    made = Scene(tmp_path, monkeypatch)
    made.write("mine.yaml", RECIPE)
    made.write("small.yaml", SUITE)
    made.write("words.txt", WORDS)
    return made


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below a folder: what it is, when it was changed (a folder's time tells of files come and gone)."""
    found = {".": root.stat().st_mtime_ns}
    for path in root.rglob("*"):
        stat = path.lstat()
        found[str(path.relative_to(root))] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


def check_message(said: str, words: tuple[str, ...], root: Path) -> None:
    """One error with its three parts, in lines that fit; it names what it must."""
    assert said.startswith("error: ")
    assert len(re.findall(r"^\s*error: ", said, re.MULTILINE)) == 1
    assert [part for part in ("\n  where: ", "\n  do: ") if said.count(part) != 1] == []
    assert "Traceback" not in said
    assert "\n\n" not in said
    flat = " ".join(said.split())
    assert [word for word in words if not re.search(word, flat)] == [], said
    ours = [one for one in said.splitlines() if str(root) not in one and not one.startswith("  where: ")]
    assert max(map(len, ours)) <= 100, said


CASES = [(name, arguments) for name, mistake in MISTAKES.items() for arguments in mistake.lines]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[f"{n}, {a.split()[0]}" for n, a in CASES])
def test_a_mistake_is_one_message_before_any_work(
    name: str, arguments: str, scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    """In words and as JSON; where two commands must find it, each in one of the two ways."""
    mistake = MISTAKES[name]
    mistake.spoil(scene)
    before = snapshot(scene.root)
    shown = mistake.shown and arguments.startswith("plan")
    capfd.readouterr()
    if len(mistake.lines) == 1 or shown or arguments != RUN:
        assert cli.main(arguments.split()) == 2
        said = capfd.readouterr()
        check_message(said.err, mistake.words, scene.root)
        assert ("REFUSED" in said.out) if shown else said.out == ""
    if len(mistake.lines) == 1 or shown or arguments == RUN:
        assert cli.main([*arguments.split(), "--json"]) == 2
        said = capfd.readouterr()
        check_message(said.err, mistake.words, scene.root)
        check_document(said.out, shown)
    assert snapshot(scene.root) == before


def check_document(said: str, shown: bool) -> None:
    """One JSON document: the error's parts, or the plan that is shown with its refusals."""
    assert said.count("\n") == 1
    document = json.loads(said)
    if shown:
        assert document["refusals"]
    else:
        assert set(document["error"]) == {"what", "where", "do"}
        assert all(document["error"].values())


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 45
    assert len(MISTAKES) == sum(map(len, TABLES))  # no name twice


def test_without_its_mistake_the_scene_is_fine(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """The cases fail for what they spoil; and a plan writes nothing."""
    before = snapshot(scene.root)
    capfd.readouterr()
    assert cli.main(PLAN.split()) == 0
    assert capfd.readouterr().err == ""
    assert snapshot(scene.root) == before


@pytest.mark.parametrize("name", ["a tag that would run code", "a config that is not JSON"])
def test_the_program_itself(name: str, scene: Scene) -> None:
    """The same through a process of its own, whose streams nothing else shares."""
    mistake = MISTAKES[name]
    mistake.spoil(scene)
    before = snapshot(scene.root)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "compress", *mistake.lines[-1].split()], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    check_message(done.stderr, mistake.words, scene.root)
    assert snapshot(scene.root) == before


def test_the_pickles_conversion_works(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """What the message says to do, done: the new folder plans."""
    scene.pickled()
    assert cli.main(PLAN.split()) == 2
    command = re.search(r'python -c "(.*)"', capfd.readouterr().err, re.DOTALL)
    assert command
    exec(command[1].replace("\\\n", ""), {})
    assert cli.main([*PLAN.split()[:-1], str(scene.model) + "-safetensors"]) == 0
