"""Methods by the name that recipes say; resolved when used."""

METHODS: dict[str, str] = {
    "gptq": "compress.methods.gptq:GPTQ",
    "rtn": "compress.methods.rtn:RTN",
}
