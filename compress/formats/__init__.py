"""On-disk formats by the name that recipes say; resolved when used."""

FORMATS: dict[str, str] = {
    "compressed-tensors": "compress.formats.compressed_tensors:COMPRESSED_TENSORS",
    "dense": "compress.formats.dense:DENSE",
}
