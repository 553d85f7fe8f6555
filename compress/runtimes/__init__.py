"""What can run an artifact: name → "module:NAME", resolved when used: nothing heavy is imported here."""

RUNTIMES: dict[str, str] = {
    "hf": "compress.runtimes.hf:HfRuntime",
    "packed": "compress.runtimes.packed:PackedRuntime",
}
