"""`make interop`: do the field's own loaders compute from our checkpoints what we compute?

SmolLM2-135M and small random models of other families (tied and untied, with and without biases) are compressed once
for each scheme and written in every format that holds the codes (`compress convert`). Each checkpoint is loaded by each
library that reads its format, in that library's environment. Compared are the losses of the same tokens and 16 greedy
ones with our decoded model's, in float32. The table goes to `results.md` beside this file, with versions and the date.

    tests/interop/setup.sh && python tests/interop/run.py [NAME…]     only rows whose name begins so
"""

import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from compress import pipeline
from compress.artifact import open_artifact
from compress.convert import convert
from compress.evaluation.stream import stream
from compress.models.words import tokenizer

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
ENVIRONMENTS = Path(os.environ.get("INTEROP", ".interop"))
# By format: the loader's name in load.py, and its environment (None: this one).
LOADERS: dict[str, list[tuple[str, str | None]]] = {
    "compressed-tensors": [("transformers", None), ("vllm", "vllm")],
    "gptq": [("gptqmodel", "gptqmodel"), ("auto_gptq", "archived"), ("vllm", "vllm")],
    "awq": [("gptqmodel", "gptqmodel"), ("autoawq", "archived"), ("vllm", "vllm")],
    "fp8": [("transformers", None)],
    "gguf": [("llama_cpp", "llamacpp"), ("transformers_gguf", None)],
}
INTEGERS = ["compressed-tensors", "gptq", "awq"]
# A model, a step, and the formats that its codes are written in.
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "smollm2 gptq W4A16": ("smollm2-135m", {"method": "gptq", "scheme": "W4A16"}, [*INTEGERS, "gguf"]),
    "smollm2 awq W4A16_ASYM": ("smollm2-135m", {"method": "awq", "scheme": "W4A16_ASYM"}, INTEGERS),
    "smollm2 rtn W8A8": ("smollm2-135m", {"method": "rtn", "scheme": "W8A8"}, ["compressed-tensors"]),
    "smollm2 gptq W3A16": ("smollm2-135m", {"method": "gptq", "scheme": "W3A16"}, ["compressed-tensors", "gptq"]),
    "smollm2 gptq W4A16 act-order": (
        "smollm2-135m", {"method": "gptq", "scheme": "W4A16", "actorder": "group"}, ["gptq"]
    ),
    "smollm2 gptq W4A16_ASYM": ("smollm2-135m", {"method": "gptq", "scheme": "W4A16_ASYM"}, ["gguf"]),
    "smollm2 rtn W8A16": ("smollm2-135m", {"method": "rtn", "scheme": "W8A16"}, ["compressed-tensors", "gguf"]),
    "qwen2 rtn W4A16": ("qwen2", {"method": "rtn", "scheme": "W4A16"}, [*INTEGERS, "gguf"]),
    "qwen2 rtn FP8_BLOCK": ("qwen2", {"method": "rtn", "scheme": "FP8_BLOCK"}, ["fp8"]),
    "qwen2 gptq Q4_K": ("qwen2", {"method": "gptq", "scheme": "Q4_K"}, ["gguf"]),
    "qwen2 rtn Q6_K": ("qwen2", {"method": "rtn", "scheme": "Q6_K"}, ["gguf"]),
    "qwen3 gptq W4A16": ("qwen3", {"method": "gptq", "scheme": "W4A16"}, [*INTEGERS, "gguf"]),
    "gemma3 gptq W4A16": ("gemma3", {"method": "gptq", "scheme": "W4A16"}, [*INTEGERS, "gguf"]),
    "llama3 gptq W4A16": ("llama3", {"method": "gptq", "scheme": "W4A16"}, ["gguf"]),
    "yarn gptq W4A16": ("yarn", {"method": "gptq", "scheme": "W4A16"}, ["gguf"]),
}  # fmt: skip
# Random models with SmolLM2's tokenizer: what their configs say beyond the common.
_COMMON = {
    "vocab_size": 49152, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},  # untied, with biases
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 128},
    "gemma3": {
        "model_type": "gemma3_text", "tie_word_embeddings": True, "num_hidden_layers": 6, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 64,
    },
    "llama3": {
        "model_type": "llama", "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        },
    },
    "yarn": {
        "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        },
    },
}  # fmt: skip
PROMPT = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,"  # every next token leads by 3 nats: no tie that rounding decides
)
# What a library is known not to do, by case, format and loader.
LIMITS: dict[tuple[str, str, str], str] = {
    ("smollm2 awq W4A16_ASYM", "gptq", "vllm"): "refused: vLLM reads symmetric weights of this format only",
    ("smollm2 gptq W3A16", "compressed-tensors", "vllm"): "refused: vLLM's kernels read 4 and 8 bits",
    ("smollm2 gptq W3A16", "gptq", "vllm"): "refused: on CPUs vLLM's kernels read 4 bits",
    ("smollm2 gptq W4A16 act-order", "gptq", "vllm"): "refused: vLLM reads no act-order `group` any more",
    ("smollm2 rtn W8A16", "compressed-tensors", "vllm"): "refused: on CPUs vLLM's kernels read 4 bits",
    ("llama3", "gguf", "transformers_gguf"): "transformers overlooks Llama 3's rotary scaling in GGUF",
    ("yarn", "gguf", "transformers_gguf"): "transformers overlooks YaRN's rotary scaling in GGUF",
}
TEXT = "Hello  wörld, it's 12345 — naïve 中文字 🙂🙂\n\n\tdef f(x):\n    return x ** 2  # …\n" + PROMPT
MESSAGES = [
    {"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 2 + 2?"},
]  # fmt: skip
TOLERANCE = 0.03  # nats a token, of the mean loss: bfloat16 layers against float32


def random_model(name: str, folder: Path, words: Path) -> Path:
    """A model of random weights, every one of which matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**_COMMON, **RANDOM[name]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for part, parameter in model.named_parameters():
            scale = 0.5 if part.endswith("bias") else 0.08
            neutral = 1.0 if "norm" in part and name != "gemma3" else 0.0
            parameter.data.normal_(neutral, 0.1 if "norm" in part else scale)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(words / file, folder / file)
    return folder


def solved(name: str, model: str, step: dict[str, Any], fmt: str, folder: Path) -> Path:
    """The artifact of one step, not evaluated."""
    grouped = step["scheme"].startswith(("W3A16", "W4A16"))
    document = {
        "version": 1, "summary": name, "steps": [{**step, **({"group_size": 64} if grouped else {})}], "format": fmt,
        "calibration": {"dataset": "embedded", "samples": 16, "seq_len": 512},
    }  # fmt: skip
    recipe = folder / f"{name.replace(' ', '-')}.yaml"
    recipe.write_text(yaml.safe_dump(document))
    out = folder / f"{recipe.stem}-{fmt}"
    return pipeline.run(str(recipe), model, out, evaluate=False, progress=lambda *_: None).folder


def ours(folder: Path, tokens_NT: torch.Tensor) -> list[list[float]]:
    """Losses of our own decoded model, float32."""
    model = open_artifact(folder)
    head = model.head()
    hidden_NTD = stream(model, tokens_NT)
    return [
        torch.nn.functional.cross_entropy(head(h_TD[None])[0, :-1], t_T[1:], reduction="none").tolist()
        for h_TD, t_T in zip(hidden_NTD, tokens_NT, strict=True)
    ]


def greedy(folder: Path, prompt_T: torch.Tensor, count: int) -> list[int]:
    """Tokens that our own decoded model finds likeliest, one after the other."""
    model = open_artifact(folder)
    head, tokens_T = model.head(), prompt_T
    for _ in range(count):
        tokens_T = torch.cat([tokens_T, head(stream(model, tokens_T[None]))[0, -1:].argmax(-1)])
    return tokens_T[len(prompt_T) :].tolist()


def ask(loader: str, environment: str | None, folder: Path, request: Path, work: Path) -> dict[str, Any]:
    """What a library computes, or the last line of what it says when it cannot."""
    python = sys.executable if environment is None else str(ENVIRONMENTS / environment / "bin" / "python")
    if not Path(python).exists():
        return {"error": "its environment is not installed"}
    answer = work / "answer.json"
    answer.unlink(missing_ok=True)
    settings = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(HERE / "load.py"), loader, str(folder), str(request), str(answer)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=1800, check=False)
    if answer.is_file():
        return dict(json.loads(answer.read_text()))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    return {"error": (said or [f"exit code {done.returncode}"])[-1][:160].replace("|", "/")}


def compared(wanted: dict[str, Any], found: dict[str, Any], *, random: bool) -> tuple[str, str, str, bool]:
    """Perplexity of both, how many greedy tokens agree, and whether these and the words are as they should be.

    Of random weights only the losses count: their likeliest tokens are hardly likelier than the next.
    """
    if "error" in found:
        return "", "", found["error"], False
    losses = [torch.tensor(side["nll"]).mean().item() for side in (wanted, found)]
    pairs = list(zip(wanted["generated"], found["generated"], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    told, good = f"{same} of {len(pairs)}", abs(losses[0] - losses[1]) <= TOLERANCE and (random or same == len(pairs))
    for part in found.keys() & wanted.keys() & {"words", "chat"}:
        if found[part] != wanted[part]:
            told, good = f"{told}; other {part}", False
    return f"{math.exp(losses[0]):.3f}", f"{math.exp(losses[1]):.3f}", told, good


def main(only: list[str]) -> int:
    """Runs the cases that are asked for, all by default, and writes the table of all that ran so far."""
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for case, found in known.items():  # what became known since
        found["rows"] = [judged(case, row) for row in found["rows"]]
    failed = 0
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        work = Path(name)
        words = solved("base", "smollm2-135m", {"method": "rtn", "scheme": "W8A8"}, "compressed-tensors", work)
        ids = list(tokenizer(words).encode((HERE.parents[1] / "README.md").read_text()[:4000]))
        tokens_NT = torch.tensor(ids[: 2 * 256]).view(2, 256)
        prompt_T = torch.tensor(list(tokenizer(words).encode(PROMPT)))
        for case in CASES:
            if not only or any(case.startswith(start) for start in only):
                known[case] = run_case(case, work, words, (tokens_NT, prompt_T))
                failed += sum(row[-1] == "no" for row in known[case]["rows"])
                RESULTS.write_text(json.dumps({name: known[name] for name in CASES if name in known}, indent=1) + "\n")
                (HERE / "results.md").write_text(table(known))
    return 1 if failed else 0


def run_case(case: str, work: Path, words: Path, asked: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Solves once, and has every loader of every format compute: rows, the libraries' versions, the date."""
    model, step, formats = CASES[case]
    tokens_NT, prompt_T = asked
    if model in RANDOM:
        tokens_NT = tokens_NT[:1, :96]  # llama.cpp's server takes half a second to say all of a distribution
        if not (work / model).is_dir():
            random_model(model, work / model, words)
    request = work / "request.json"
    said = {"tokens": tokens_NT.tolist(), "prompt": prompt_T.tolist(), "output": 16}
    request.write_text(json.dumps({**said, "text": TEXT, "messages": MESSAGES}))
    first = solved(case, str(work / model) if model in RANDOM else model, step, formats[0], work)
    spoken = tokenizer(words)
    wanted = {
        "nll": ours(first, tokens_NT), "generated": greedy(first, prompt_T, 16), "words": list(spoken.encode(TEXT)),
        "chat": spoken.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True),
    }  # fmt: skip
    rows, versions = [], dict[str, str]()
    for fmt in formats:
        folder = first if fmt == formats[0] else convert(first, fmt, None, lambda *_: None).folder
        for loader, environment in LOADERS[fmt]:
            found = ask(loader, environment, folder, request, work)
            *cells, good = compared(wanted, found, random=model in RANDOM)
            versions.update(found.get("versions", {}))
            rows.append(judged(case, [fmt, loader, *cells, "yes" if good else "no"]))
            sys.stdout.write(" | ".join([case, *rows[-1]]) + "\n")
            sys.stdout.flush()
    return {"date": datetime.date.today().isoformat(), "versions": versions, "rows": rows}


def judged(case: str, row: list[str]) -> list[str]:
    """A row of results; one that does not agree says why, where that is known of the library."""
    fmt, loader, *figures, said, agrees = row
    limits = (why for (start, f, l), why in LIMITS.items() if case.startswith(start) and (f, l) == (fmt, loader))
    limit = f"{loader} does not know this family" if "isn't supported yet" in said else next(limits, "")
    return [fmt, loader, *figures, limit, "known"] if agrees == "no" and limit else row


def table(known: dict[str, Any]) -> str:
    """All results, for reading."""
    versions = {name: number for found in known.values() for name, number in found["versions"].items()}
    said = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    dates = sorted(found["date"] for found in known.values())
    rows = [f"| {' | '.join([case, *row])} |" for case in CASES if case in known for row in known[case]["rows"]]
    return "\n".join([
        "# Other libraries on our checkpoints", "",
        f"`make interop`, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, on a CPU: {said}.", "",
        "Perplexity of 510 tokens (of random models 95) by our own decoded model (float32) and by the library,",
        "and how many of 16 greedy tokens agree. Losses may differ by 0.03 nats a token: gptqmodel and vLLM",
        "compute in bfloat16, llama.cpp rounds inputs to 8 bits, transformers leaves the inputs of fp8 layers as",
        "they are on a CPU. Of random weights only the losses count. llama.cpp must also cut a text of many kinds",
        "into the same tokens and write a conversation alike. auto-gptq 0.7.1 leaves tied embeddings at zero:",
        "they are put in by hand.", "",
        "| artifact | format | loader | ours | theirs | same tokens | agrees |", "|---|---|---|--:|--:|--:|---|",
        *rows, "",
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
