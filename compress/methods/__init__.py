"""Methods by the name that recipes say; resolved when used."""

METHODS: dict[str, str] = {
    "awq": "compress.methods.awq:AWQ",
    "gptq": "compress.methods.gptq:GPTQ",
    "rtn": "compress.methods.rtn:RTN",
    "smoothquant": "compress.methods.smoothquant:SMOOTHQUANT",
}
