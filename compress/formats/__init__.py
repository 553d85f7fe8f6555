"""On-disk formats by the name that recipes say; resolved when used."""

FORMATS: dict[str, str] = {
    "compressed-tensors": "compress.formats.compressed_tensors:COMPRESSED_TENSORS",
    "gptq": "compress.formats.gptq:GPTQ",
    "awq": "compress.formats.awq:AWQ",
    "fp8": "compress.formats.fp8:FP8",
    "gguf": "compress.formats.gguf:GGUF",
    "dense": "compress.formats.dense:DENSE",
}
