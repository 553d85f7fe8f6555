"""GGUF's blocks: codes survive, and llama.cpp's own library reads the same numbers out of them."""

from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from torch import Tensor

from compress.errors import CompressError
from compress.formats import gguf
from compress.methods.gptq import GptqConfig, solve
from compress.methods.rounding import round_to_nearest
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import PRESETS, QuantArgs, Scheme

KINDS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def scheme_of(num_bits: int, group: int | None, *, symmetric: bool = True) -> Scheme:
    strategy: Any = "group" if group else "channel"
    return Scheme(weights=QuantArgs(num_bits=num_bits, symmetric=symmetric, strategy=strategy, group_size=group))


def weight(rows: int = 24, columns: int = 512, seed: int = 0) -> Tensor:
    w_OI = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 30
    w_OI[:, 32:64] = w_OI[:, 32:64].abs()  # a block without a negative value
    w_OI[5] = 0
    return w_OI


def coded(scheme: Scheme, **shape: int) -> QuantizedWeight:
    return round_to_nearest(weight(**shape), None, scheme.weights, scale_search=False)


def theirs(kind: str, stored_OB: Tensor) -> Tensor:
    """The weight that llama.cpp's Python library makes of blocks."""
    values = library.quants.dequantize(stored_OB.numpy(), library.GGMLQuantizationType[kind])
    return torch.from_numpy(values.astype(np.float32))


FLAT = [
    (4, 32, True, "Q4_0"), (4, 64, True, "Q4_0"), (3, 128, True, "Q4_0"), (4, None, True, "Q4_0"),
    (4, 32, False, "Q4_1"), (2, 64, False, "Q4_1"), (5, 32, True, "Q5_0"), (5, 64, False, "Q5_1"),
    (8, 32, True, "Q8_0"), (8, None, True, "Q8_0"), (6, 32, True, "Q8_0"),
    (2, 256, True, "Q2_K"), (2, None, False, "Q2_K"), (3, 256, True, "Q3_K"), (3, 256, False, "Q4_K"),
    (4, 256, False, "Q4_K"), (4, None, False, "Q4_K"), (5, 512, False, "Q5_K"), (6, 256, True, "Q6_K"),
]  # fmt: skip


@pytest.mark.parametrize(("num_bits", "group", "symmetric", "kind"), FLAT)
def test_codes_are_carried_over(num_bits: int, group: int | None, symmetric: bool, kind: str) -> None:
    scheme = scheme_of(num_bits, group, symmetric=symmetric)
    assert gguf.can_write(scheme, "llama") is None
    solved = coded(scheme)
    tensors = gguf.encode("l", solved, scheme)
    assert list(tensors) == [f"l.{kind}"]
    stored_OB = tensors[f"l.{kind}"]
    assert stored_OB.numel() == gguf.weight_bytes(scheme, (24, 512))
    back = gguf.read("l", tensors, scheme)
    assert torch.equal(back.q_OI, solved.q_OI)
    assert torch.equal(back.scale, solved.scale.clamp_min(2.0**-24))
    if solved.zero is not None and back.zero is not None:
        assert torch.equal(back.zero, solved.zero)
    decoded_OI = gguf.decode("l", tensors, scheme)
    assert torch.equal(decoded_OI, theirs(kind, stored_OB))
    if kind in ("Q4_1", "Q5_1"):  # their offset d · zero is a float16
        torch.testing.assert_close(decoded_OI, dequantize(solved), rtol=2**-10, atol=2**-10 * 0.1)
    else:
        assert torch.equal(decoded_OI[:5], dequantize(solved)[:5])
        torch.testing.assert_close(decoded_OI, dequantize(solved))


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_k_quants_hold_what_was_solved(kind: str, search: bool) -> None:
    scheme, w_OI = PRESETS[kind], weight()
    solved = round_to_nearest(w_OI, None, scheme.weights, scale_search=search)
    tensors = gguf.encode("l", solved, scheme)
    decoded_OI = gguf.decode("l", tensors, scheme)
    assert torch.equal(decoded_OI, theirs(kind, tensors[f"l.{kind}"]))
    torch.testing.assert_close(decoded_OI, dequantize(solved), rtol=1e-5, atol=1e-7)
    back = gguf.read("l", tensors, scheme)
    assert torch.equal(back.q_OI, solved.q_OI)
    assert torch.equal(gguf.encode("l", back, scheme)[f"l.{kind}"], tensors[f"l.{kind}"])
    error = float((decoded_OI - w_OI).norm() / w_OI.norm())
    assert error < {2: 0.35, 3: 0.2, 4: 0.1, 5: 0.05, 6: 0.025}[scheme.weights.num_bits]


@pytest.mark.parametrize("kind", KINDS)
def test_gptq_solves_k_quants(kind: str) -> None:
    """The solver's own value of every weight, whatever its codes stand under; better than rounding on its inputs."""
    generator = torch.Generator().manual_seed(2)
    x_NI = torch.randn(1024, 256, generator=generator) @ torch.randn(256, 256, generator=generator) / 16
    w_OI, gram_II = weight(16, 256), x_NI.t() @ x_NI / 1024
    scheme = PRESETS[kind]
    for order in ("static", None):
        solved = solve(w_OI, gram_II, scheme.weights, GptqConfig(scheme=kind, actorder=order))  # type: ignore[arg-type]
        tensors = gguf.encode("l", solved, scheme)
        torch.testing.assert_close(gguf.decode("l", tensors, scheme), dequantize(solved), rtol=1e-5, atol=1e-7)
        nearest = round_to_nearest(w_OI, gram_II, scheme.weights, scale_search=True)

        def loss(found: QuantizedWeight) -> float:
            delta_OI = dequantize(found) - w_OI
            return float(((delta_OI @ gram_II) * delta_OI).sum())

        assert loss(solved) < 0.8 * loss(nearest)


@pytest.mark.parametrize("kind", [*gguf.BLOCKS])
def test_any_blocks_mean_what_the_library_says(kind: str) -> None:
    """Random bytes, with scales that are numbers: also what our own solvers never write."""
    size, columns = gguf.BLOCKS[kind]
    stored_OB = torch.randint(0, 256, (6, 3 * size), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    block_ONB = stored_OB.view(6, 3, size)
    numbers = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
    }
    for place in numbers.get(kind, (0,)):
        block_ONB[..., place : place + 2] = torch.tensor([0x34, 0x2C], dtype=torch.uint8)  # 0.0657
    found_OI = gguf.decode("l", {f"l.{kind}": stored_OB}, PRESETS["W4A16"])
    assert found_OI.shape == (6, 3 * columns)
    torch.testing.assert_close(found_OI, theirs(kind, stored_OB), rtol=1e-6, atol=1e-6)


def test_what_it_cannot_hold() -> None:
    assert "families llama" in str(gguf.can_write(scheme_of(4, 32), "opt"))
    assert "activations" in str(gguf.can_write(PRESETS["W8A8"], "llama"))
    for scheme in (
        scheme_of(8, 32, symmetric=False),
        scheme_of(4, 16),
        PRESETS["FP8_BLOCK"].model_copy(update={"input_activations": None}),
    ):
        assert "multiples of 32" in str(gguf.can_write(scheme, "llama"))
    assert gguf.can_write(scheme_of(4, 32).reordered(), "llama")
    assert gguf.misfit((8, 100)) == "100 is no multiple of 32"
    assert gguf.misfit((7, 96)) is None
    assert "room for 4" in str(gguf.caveat(scheme_of(3, 64)))
    assert "room for" not in gguf.caveat(scheme_of(4, 64))


def test_blocks_that_are_not_the_schemes() -> None:
    scheme = scheme_of(4, 64)
    tensors = gguf.encode("l", coded(scheme), scheme)
    tensors["l.Q4_0"][0, 0] ^= 1
    with pytest.raises(CompressError, match="differ in their scales"):
        gguf.read("l", tensors, scheme)
    with pytest.raises(CompressError, match="of type Q4_0"):
        gguf.read("l", tensors, scheme_of(8, 32))


def test_settings_come_back() -> None:
    schemes = {"a.q": scheme_of(4, 32), "a.k": PRESETS["Q6_K"]}
    settings = gguf.config(schemes, ["lm_head"])
    assert gguf.read_config(settings, ["a.q", "a.k", "b"]) == schemes
    with pytest.raises(CompressError, match="not read"):
        gguf.read_config({"quant_method": "gguf"}, ["a.q"])


@pytest.mark.parametrize("size", [1e-6, 1e9])
def test_weights_that_float16_scales_cannot_say(size: float) -> None:
    """Refused rather than blown up or turned into infinities; a group that is nearly nothing beside the rest is not."""
    scheme = scheme_of(4, 32)
    with pytest.raises(CompressError, match="too small" if size < 1 else "too large"):
        gguf.encode("l", round_to_nearest(weight() * size, None, scheme.weights, scale_search=False), scheme)
    w_OI = weight()
    w_OI[3] *= 1e-9
    gguf.encode("l", round_to_nearest(w_OI, None, scheme.weights, scale_search=False), scheme)
