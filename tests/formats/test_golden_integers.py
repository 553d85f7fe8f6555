"""The very words that AutoGPTQ, GPTQModel and AutoAWQ write, and the weights that they read back."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from compress.formats import awq, gptq
from compress.numerics import QuantizedWeight
from compress.schemes import QuantArgs, Scheme
from tests.formats.make_golden_integers import FOLDER, LIBRARIES, cases, inputs

CASES = [(library, name) for library in LIBRARIES for name in cases(library)]


def golden(library: str, name: str) -> dict[str, Tensor]:
    path: Path = FOLDER / f"{library}.safetensors"
    with safe_open(path, framework="pt") as file:
        return {k[len(name) + 1 :]: file.get_tensor(k) for k in file.keys() if k.startswith(f"{name}.")}  # noqa: SIM118


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_inputs_are_those_of_the_script(library: str) -> None:
    for name, case in cases(library).items():
        stored = golden(library, name)
        for part, tensor in inputs(*case).items():
            assert torch.equal(stored[part], tensor), (name, part)


@pytest.mark.parametrize(("library", "name"), CASES)
def test_same_tensors_and_same_weight(library: str, name: str) -> None:
    bits, symmetric, group, order = cases(library)[name]
    stored, half = golden(library, name), 1 << (bits - 1)
    fmt = awq if library == "autoawq" else gptq
    grain = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    args = QuantArgs.model_validate({"num_bits": bits, "symmetric": symmetric, **grain})
    scheme = Scheme(weights=args).reordered() if order else Scheme(weights=args)
    weight = QuantizedWeight(
        q_OI=(stored["codes"].int() - half).to(torch.int8), scale=stored["scale"].float(),
        zero=None if symmetric else (stored["zero"].int() - half).to(torch.int8),
        g_idx_I=stored["g_idx"] if order else None,
    )  # fmt: skip
    tensors = fmt.encode("l", weight, scheme)
    theirs = {name: stored[name.removeprefix("l.")] for name in tensors}
    for part, tensor in tensors.items():
        assert torch.equal(tensor, theirs[part].to(tensor.dtype)), part
    decoded_OI = fmt.decode("l", theirs, scheme)
    torch.testing.assert_close(decoded_OI, stored["weight"].float(), rtol=1e-3, atol=1e-4)  # theirs in float16
