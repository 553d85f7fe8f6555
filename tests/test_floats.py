"""Float codes: every code of E4M3, E2M1 and E8M0 against its definition, rounding against brute force in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.methods.rtn import RtnConfig, solve
from compress.methods.scale_search import minmax_qparams, search_qparams
from compress.numerics import (
    QuantizedWeight,
    dequantize,
    pack_e8m0,
    pack_fp4,
    power_of_two_scale,
    quantize,
    quantize_activations,
    static_scale,
    tensor_scale,
    unpack_e8m0,
    unpack_fp4,
)
from compress.schemes import PRESETS, QuantArgs

FLOATS = {8: PRESETS["FP8_DYNAMIC"].weights, 4: PRESETS["NVFP4A16"].weights}
WEIGHTS = {name: scheme.weights for name, scheme in PRESETS.items() if scheme.weights.type == "float"}
INPUTS = {name: s.input_activations for name, s in PRESETS.items() if s.input_activations}


def magnitude(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The number of a code without its sign, by the definition of a small IEEE-like float."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


GRIDS = {8: [magnitude(c, 4, 3) for c in range(127)], 4: [magnitude(c, 2, 1) for c in range(8)]}  # 127 is NaN


def nearest(x: float, grid: list[float]) -> float:
    """The nearest grid number; of two, the one with the even code; beyond the last, the last."""
    size = abs(x)
    code = min(range(len(grid)), key=lambda c: (abs(grid[c] - size), c & 1))
    return -grid[code] if x < 0 else grid[code]


def test_grids_are_the_formats_own() -> None:
    assert torch.tensor(GRIDS[8]).equal(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    assert GRIDS[4] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for bits, args in FLOATS.items():
        assert args.qmax == GRIDS[bits][-1] == -args.qmin


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_nearest_even_and_saturates(bits: int) -> None:
    """At every code, every midpoint, and just beside each."""
    grid = GRIDS[bits]
    points = [*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), 1.5 * grid[-1], 1e6]
    x = torch.tensor([*points, *(-p for p in points)])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])
    found = quantize(x, torch.tensor(1.0), 0.0, FLOATS[bits])
    assert found.tolist() == [nearest(v, grid) for v in x.tolist()]


@pytest.mark.parametrize("bits", [8, 4])
def test_infinity_saturates_and_nan_stays(bits: int) -> None:
    found = quantize(torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.tensor(1.0), 0.0, FLOATS[bits])
    assert found[:2].tolist() == [GRIDS[bits][-1], -GRIDS[bits][-1]]
    assert bool(found[2].isnan())


def test_every_byte_of_two_e2m1_codes_comes_back() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    q_OI = unpack_fp4(packed)
    assert q_OI.dtype == torch.float8_e4m3fn
    assert torch.equal(pack_fp4(q_OI), packed)
    signed = [*GRIDS[4], *(-v for v in GRIDS[4])]
    assert q_OI.float().flatten().tolist() == [signed[b >> s & 15] for b in range(256) for s in (0, 4)]


def test_every_power_of_two_comes_back() -> None:
    codes = torch.arange(1, 255, dtype=torch.uint8)
    scale = unpack_e8m0(codes)
    assert scale.double().tolist() == [2.0 ** (c - 127) for c in range(1, 255)]
    assert torch.equal(pack_e8m0(scale), codes)


@settings(max_examples=200, deadline=None)
@given(mantissa=st.floats(1, 2, exclude_max=True, width=32), exponent=st.integers(-90, 120))
def test_power_of_two_scales(mantissa: float, exponent: int) -> None:
    """The largest code falls into [3.5, 7): rounded to 4 or 6, never to less than half the range."""
    scale = power_of_two_scale(torch.tensor(mantissa * 2.0**exponent))
    assert float(scale) == 2.0 ** (exponent - 2 + (mantissa >= 1.75))


def draw(seed: int, exponent: int = 0, rows: int = 128, columns: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    w_OI = torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).exp()
    return w_OI * 2.0**exponent


def coded(w_OI: Tensor, args: QuantArgs) -> QuantizedWeight:
    return solve(w_OI, None, args, RtnConfig(scheme="FP8"))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_errors_are_within_half_a_step(name: str, exponent: int) -> None:
    """Relative to the value, 2^-4 for E4M3 and 2^-2 for E2M1; below the smallest normal number half a code."""
    args = WEIGHTS[name]
    w_OI = draw(0, exponent)
    weight = coded(w_OI, args)
    scale_OI = weight.scale.repeat_interleave(128 // weight.scale.shape[1], 1).double().expand(128, 128)
    relative, smallest = (2.0**-4, 2.0**-9) if args.num_bits == 8 else (2.0**-2, 0.5)
    limited_OI = w_OI.double().clamp(-args.qmax * scale_OI, args.qmax * scale_OI)
    bound_OI = torch.maximum(limited_OI.abs() * relative, smallest / 2 * scale_OI)
    assert bool(((dequantize(weight).double() - limited_OI).abs() <= bound_OI * (1 + 1e-5)).all())
    clipped_OI = w_OI.double().abs() / (args.qmax * scale_OI)
    assert float(clipped_OI.max()) <= {"bfloat16": 1 + 2**-8, "e4m3": 1 + 2**-4, "e8m0": 7 / 6}[args.scale_kind]


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(WEIGHTS)), seed=st.integers(0, 999), exponent=st.integers(-60, 60))
def test_rounding_twice_is_rounding_once_and_keeps_order(name: str, seed: int, exponent: int) -> None:
    args = WEIGHTS[name]
    w_OI = draw(seed, exponent)
    weight = coded(w_OI, args)
    values_OI = dequantize(weight)
    scale = weight.scale.unsqueeze(-1)
    again = quantize(values_OI.view(128, weight.scale.shape[1], -1), scale, 0.0, args).view(128, 128)
    assert torch.equal(again, weight.q_OI.float())
    ordered = quantize(w_OI[0].sort().values, weight.scale[0, 0], 0.0, args)
    assert bool((ordered.diff() >= 0).all())


@pytest.mark.parametrize("name", WEIGHTS)
def test_zeros_and_extreme_sizes(name: str) -> None:
    args = WEIGHTS[name]
    for w_OI in (torch.zeros(128, 128), draw(1) * 1e36, draw(1) * 1e-36):
        w_OI[0, :32] = 0
        weight = coded(w_OI, args)
        assert bool((weight.scale.isfinite() & (weight.scale > 0)).all())
        values_OI = dequantize(weight)
        assert bool(values_OI.isfinite().all())
        assert bool((values_OI[0, :32] == 0).all())


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    w_OI = draw(2)
    w_OI[3, 4] = value
    with pytest.raises(ValueError, match="not finite"):
        coded(w_OI, WEIGHTS[name])


def test_a_block_shares_its_scale() -> None:
    args = QuantArgs(num_bits=8, type="float", strategy="block", block_structure=(4, 16))
    w_OI = draw(3, rows=8, columns=32)
    scale_OG, zero = minmax_qparams(w_OI, args)
    assert zero is None
    for row, column in itertools.product((0, 4), (0, 16)):
        largest = w_OI[row : row + 4, column : column + 16].abs().max()
        assert scale_OG[row : row + 4, column // 16].tolist() == [float((largest / 448).bfloat16())] * 4


def test_nvfp4_scales_are_e4m3_below_one_of_the_tensor() -> None:
    """Against float64: the largest group gets about the largest scale, and every value is a bfloat16 number."""
    args = WEIGHTS["NVFP4A16"]
    w_OI = draw(4)
    global_scale = tensor_scale(w_OI, args)
    assert global_scale is not None
    assert float(global_scale) == 2.0 ** math.floor(math.log2(448 * 6 / float(w_OI.abs().max())))
    values_OI = dequantize(coded(w_OI, args))
    assert torch.equal(values_OI, values_OI.bfloat16().float())
    scale_OG, _ = minmax_qparams(w_OI, args)
    for found, group in zip(scale_OG.flatten().tolist(), w_OI.view(-1, 16), strict=True):
        local = nearest(float(group.abs().max().double() / 6 * global_scale.double()), GRIDS[8])
        assert found == pytest.approx(max(local, 2.0**-9) / float(global_scale), rel=1e-6)


def test_the_search_lowers_the_error_of_fp4_groups() -> None:
    w_OI = draw(5)
    for name in ("NVFP4A16", "MXFP4A16"):
        args = WEIGHTS[name]
        errors = []
        for scale_OG, _ in (minmax_qparams(w_OI, args), search_qparams(w_OI, torch.ones(128), args)):
            w_OGi, scale = w_OI.view(128, scale_OG.shape[1], -1), scale_OG.unsqueeze(-1)
            errors.append((quantize(w_OGi, scale, 0.0, args) * scale - w_OGi).square().sum(-1))
        assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())
        assert errors[1].sum() < errors[0].sum()


# ---- activations


def naive_inputs(x_NI: Tensor, args: QuantArgs, scale: float | None) -> Tensor:
    """One value at a time, float64."""
    x64_NI, found = x_NI.double(), torch.empty(x_NI.shape, dtype=torch.float64)
    size = args.group_size or x_NI.shape[1]
    for n, start in itertools.product(range(len(x_NI)), range(0, x_NI.shape[1], size)):
        part = x64_NI[n, start : start + size]
        steps = 448 if args.type == "float" else 127.5
        by = scale or max(float(part.abs().max()) / steps, 2.0**-100)
        for i, value in enumerate((part / by).tolist()):
            q = nearest(value, GRIDS[8]) if args.type == "float" else min(max(round(value), -128), 127)
            found[n, start + i] = q * by
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_activations_equal_float64(name: str) -> None:
    args = INPUTS[name]
    x_NI = draw(6, rows=6, columns=256)
    x_NI[2] = 0
    x_NI[3] *= 1e-30
    scale = None if args.dynamic else static_scale(x_NI[:2].abs().max(), args)
    found = quantize_activations(x_NI, args, scale)
    expected = naive_inputs(x_NI, args, None if scale is None else float(scale))
    wrong = ~torch.isclose(found.double(), expected, rtol=1e-5, atol=0)
    assert int(wrong.sum()) <= 2  # float32 may fall on the other side of a tie


@pytest.mark.parametrize("name", INPUTS)
def test_activations_keep_shape_and_dtype_and_do_not_see_their_neighbours(name: str) -> None:
    args = INPUTS[name]
    x = draw(7, rows=6, columns=256).view(2, 3, 256)
    scale = None if args.dynamic else torch.tensor([0.01])
    before = x.clone()
    found = quantize_activations(x, args, scale)
    assert torch.equal(x, before)
    assert torch.equal(found[1:, :2], quantize_activations(x[1:, :2], args, scale))
    assert quantize_activations(x.bfloat16(), args, scale).dtype == torch.bfloat16
    assert found.shape == x.shape


@pytest.mark.parametrize("name", INPUTS)
def test_activations_that_are_not_numbers_stay_visible(name: str) -> None:
    args: Any = INPUTS[name]
    x = draw(8, rows=1, columns=256)
    x[0, 5] = torch.nan
    assert bool(quantize_activations(x, args, None if args.dynamic else torch.tensor([1.0])).isnan().any())
