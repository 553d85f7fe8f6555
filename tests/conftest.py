"""Tiny random models made from a config, with a byte tokenizer beside: no test needs a network or a download."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import pipeline
from compress.verify import Request, examine

FAMILY_NAMES = (
    "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2",
    "qwen3",
)  # fmt: skip
# A family of each structure, for tests that take their time: the walk and the models' own tests cover all families.
STRUCTURES = ("gemma3_text", "gpt2", "gpt_neox", "llama", "opt", "phi3")
COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
_ELSEWHERE: dict[str, dict[str, str]] = {  # other names of the common keys; "" for a key that a family has not
    "falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": ""},
    "gpt2": {
        "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_attention_heads": "n_head",
        "num_key_value_heads": "", "max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer",
    },
    "gpt_neox": {"num_key_value_heads": ""},
    "opt": {"intermediate_size": "ffn_dim", "num_key_value_heads": ""},
}  # fmt: skip
MakeTiny = Callable[..., Path]


def family_settings(family: str, layers: int) -> dict[str, Any]:
    """What a family's config has beyond the common; windows are shorter than the tests' sequences."""
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    special: dict[str, dict[str, Any]] = {
        "gemma2": {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": alternating,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        },
        "gemma3_text": {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": alternating,
        },
        "mistral": {"head_dim": 16, "sliding_window": 8},
        "qwen3": {"head_dim": 16},
    }  # fmt: skip
    common = {**COMMON, "num_hidden_layers": layers}
    renamed = {_ELSEWHERE.get(family, {}).get(key, key): value for key, value in common.items()}
    renamed.pop("", None)
    return {**renamed, **special.get(family, {})}


def byte_tokenizer() -> Any:
    """One token a byte; `<s>` in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab.append("Āā")  # one merge, of two bytes that no text has: llama.cpp reads no tokenizer without any
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[("Ā", "ā")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_tiny(folder: Path, family: str, *, tied: bool, layers: int, seed: int, **overrides: Any) -> Path:
    """A random bf16 model whose every parameter matters: biases and norms are drawn too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**family_settings(family, layers), "tie_word_embeddings": tied, **overrides}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.dim() == 2:
                parameter.copy_(drawn * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.1 * drawn)  # norms around their neutral value, biases around zero
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """`tiny(family, *, tied, layers=2, seed=0, **overrides)`: the folder of a tiny model.

    `overrides` are keys of the family's config. The same arguments give the same folder in the whole session:
    copy it before changing anything in it.
    """
    made: dict[str, Path] = {}

    def make(family: str, *, tied: bool, layers: int = 2, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, tied, layers, seed, sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}-")
            made[key] = save_tiny(folder, family, tied=tied, layers=layers, seed=seed, **overrides)
        return made[key]

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = [f"word{(i * i) % 97} is not {i % 13}." for i in range(3000)]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def verify_here(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Verification in this process rather than a fresh one, with plain transformers' reload: seconds less each."""
    requests: list[Request] = []

    def verify(request: Request) -> dict[str, Any]:
        requests.append(request)
        return examine(Request(**{**request.__dict__, "whole": True}))

    monkeypatch.setattr(pipeline, "verify", verify)
    return requests
