"""Model families by their config's `model_type`; resolved when used."""

FAMILIES: dict[str, str] = {
    "gemma3_text": "compress.models.gemma3_text:GEMMA3_TEXT",
    "llama": "compress.models.llama:LLAMA",
    "mistral": "compress.models.mistral:MISTRAL",
    "phi3": "compress.models.phi3:PHI3",
    "qwen2": "compress.models.qwen2:QWEN2",
    "qwen3": "compress.models.qwen3:QWEN3",
}
