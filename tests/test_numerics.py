"""The arithmetic: packing is a bijection, rounding is nearest, zero is exact, scales are what is stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import numerics
from compress.methods.scale_search import minmax_qparams
from compress.numerics import (
    QuantizedWeight,
    code_dtype,
    dequantize,
    pack_int32,
    qparams,
    quantize,
    round_scale,
    unpack_int32,
)
from compress.schemes import PRESETS, QuantArgs

BITS = (2, 3, 4, 8)


def draw(shape: tuple[int, ...], seed: int, magnitude: float = 1.0) -> Tensor:
    return magnitude * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(w_OI: Tensor, args: QuantArgs) -> QuantizedWeight:
    """Nearest codes over the plain ranges."""
    scale, zero = minmax_qparams(w_OI, args)
    w_OGi = w_OI.view(len(w_OI), scale.shape[-1], -1)
    shift = 0.0 if zero is None else zero.float().unsqueeze(-1)
    q_OGi = quantize(w_OGi, scale.unsqueeze(-1), shift, args)
    return QuantizedWeight(q_OGi.to(code_dtype(args)).view(w_OI.shape), scale, zero)


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(2, 8), rows=st.integers(1, 5), columns=st.integers(1, 131), seed=st.integers(0, 999))
def test_packing_is_a_bijection_at_any_width(bits: int, rows: int, columns: int, seed: int) -> None:
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    q = torch.randint(low, high, (rows, columns), generator=torch.Generator().manual_seed(seed))
    packed = pack_int32(q.to(torch.int8), bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, -(-columns * bits // 32))
    unpacked = unpack_int32(packed, bits, columns)
    assert unpacked.dtype == torch.int8
    assert torch.equal(unpacked.to(torch.int64), q)


@pytest.mark.parametrize("bits", BITS)
def test_packed_bits_are_one_little_endian_string(bits: int) -> None:
    columns = 37
    q = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (1, columns), generator=torch.Generator().manual_seed(bits))
    number = sum((code + (1 << (bits - 1))) << (bits * i) for i, code in enumerate(q[0].tolist()))
    words = [number >> (32 * i) & 0xFFFFFFFF for i in range(-(-columns * bits // 32))]
    assert [w & 0xFFFFFFFF for w in pack_int32(q.to(torch.int8), bits)[0].tolist()] == words


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    symmetric=st.booleans(),
    exponent=st.integers(-20, 20),
    offset=st.floats(-3, 3),
    seed=st.integers(0, 999),
)
def test_rounding_is_nearest_inside_the_range(
    bits: int, symmetric: bool, exponent: int, offset: float, seed: int
) -> None:
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=16)
    w_OI = (draw((4, 48), seed) + offset) * 2.0**exponent
    weight = coded(w_OI, args)
    scale_OI = weight.scale.repeat_interleave(16, 1).double()
    zero_OI = 0.0 if weight.zero is None else weight.zero.repeat_interleave(16, 1).double()
    low_OI, high_OI = (args.qmin - zero_OI) * scale_OI, (args.qmax - zero_OI) * scale_OI
    w64_OI = w_OI.double()
    error_OI = (dequantize(weight).double() - w64_OI.clamp(low_OI, high_OI)).abs()
    assert bool((error_OI <= 0.5 * scale_OI * (1 + 1e-4)).all())
    # What is clipped is the half step that a range may lack at its ends and the scale's rounding to bfloat16.
    clipped_OI = (w64_OI - w64_OI.clamp(low_OI, high_OI)).abs()
    assert bool((clipped_OI <= scale_OI * (0.5 + 2**bits / 2**8)).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
def test_asymmetric_zero_is_exact(bits: int, offset: float) -> None:
    args = QuantArgs(num_bits=bits, symmetric=False, strategy="group", group_size=8)
    w_OI = draw((6, 32), bits) + offset
    w_OI[:, ::5] = 0
    weight = coded(w_OI, args)
    assert weight.zero is not None
    assert bool((dequantize(weight)[:, ::5] == 0).all())
    assert int(weight.zero.min()) >= args.qmin
    assert int(weight.zero.max()) <= args.qmax


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_scales_are_bfloat16_finite_and_positive(bits: int, symmetric: bool) -> None:
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=8)
    w_OI = draw((6, 32), bits)
    w_OI[2, 8:16] = 0
    w_OI[3] *= 1e-38
    w_OI[4] *= 1e37
    weight = coded(w_OI, args)
    assert torch.equal(weight.scale, weight.scale.bfloat16().float())
    assert bool(weight.scale.isfinite().all())
    assert bool((weight.scale > 0).all())
    values_OI = dequantize(weight)
    assert bool(values_OI.isfinite().all())
    assert bool((values_OI[2, 8:16] == 0).all())


def test_symmetric_scale_by_hand() -> None:
    args = QuantArgs(num_bits=4)
    scale, zero = qparams(torch.tensor([-7.5, -1.0]), torch.tensor([3.0, 15.0]), args)
    assert zero is None
    assert scale.tolist() == [1.0, 2.0]
    q = quantize(torch.tensor([-7.5, 7.5, 0.4, 2.6, -99.0]), scale[0], 0.0, args)
    assert q.tolist() == [-8, 7, 0, 3, -8]


def test_asymmetric_scale_by_hand() -> None:
    args = QuantArgs(num_bits=4, symmetric=False)
    low, high = torch.tensor([-5.0, 1.0, -30.0]), torch.tensor([10.0, 15.0, -3.0])
    scale, zero = qparams(low, high, args)  # the ranges become [-5, 10], [-15/14, 15], [-30, 0]
    assert scale.tolist() == [1.0, float(torch.tensor(15 / 14).bfloat16()), 2.0]
    assert zero is not None
    assert zero.tolist() == [-3, -7, 7]


def test_round_scale_keeps_bfloat16_values_and_lifts_zero() -> None:
    scale = round_scale(torch.tensor([0.0, 0.5, 1.00390625 + 1e-4]))
    assert scale[0] > 0
    assert scale[1:].tolist() == [0.5, 1.0078125]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_uses_its_range_and_stays_in_it(name: str) -> None:
    args = PRESETS[name].weights
    w_OI = draw((256, 256), 0)
    weight = coded(w_OI, args)
    assert weight.q_OI.dtype == code_dtype(args)
    q_OI = weight.q_OI.float()
    if args.strategy != "tensor":
        assert (float(q_OI.min()), float(q_OI.max())) == (args.qmin, args.qmax)
    assert float(q_OI.abs().max()) >= args.qmax
    assert args.type == "float" or args.qmax - args.qmin + 1 == 2**args.num_bits
    assert weight.scale.shape == ((1, 1) if args.strategy == "tensor" else (256, 256 // args.span(256)))
    assert (weight.zero is None) == args.symmetric
    relative = float((dequantize(weight) - w_OI).square().mean().sqrt())
    assert relative < {2: 0.8, 3: 0.3, 4: 0.15, 5: 0.07, 6: 0.03, 8: 0.03}[args.num_bits]


def test_quantize_leaves_its_input() -> None:
    args = QuantArgs(num_bits=4)
    w_OI = draw((3, 8), 0)
    before_OI = w_OI.clone()
    quantize(w_OI, torch.tensor(0.1), 0.0, args)
    assert torch.equal(w_OI, before_OI)


def test_bf16_products_are_bounded_by_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    monkeypatch.setattr(numerics, "has_bf16_matrix_unit", lambda: True)

    def fail_inside() -> None:
        with numerics.bf16_products():
            assert backend.fp32_precision == "bf16"
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert backend.fp32_precision == before
