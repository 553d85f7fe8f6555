"""Model families by their config's `model_type`; resolved when used."""

FAMILIES: dict[str, str] = {
    "falcon": "compress.models.falcon:FALCON",
    "gemma2": "compress.models.gemma2:GEMMA2",
    "gemma3_text": "compress.models.gemma3_text:GEMMA3_TEXT",
    "gpt2": "compress.models.gpt2:GPT2",
    "gpt_neox": "compress.models.gpt_neox:GPT_NEOX",
    "llama": "compress.models.llama:LLAMA",
    "mistral": "compress.models.mistral:MISTRAL",
    "olmo2": "compress.models.olmo2:OLMO2",
    "opt": "compress.models.opt:OPT",
    "phi3": "compress.models.phi3:PHI3",
    "qwen2": "compress.models.qwen2:QWEN2",
    "qwen3": "compress.models.qwen3:QWEN3",
}
