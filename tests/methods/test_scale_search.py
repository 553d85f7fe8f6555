"""The scale search finds what a brute-force float64 search over the same grid finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.methods.scale_search import minmax_qparams, search_qparams
from compress.schemes import QuantArgs

CASES = [
    QuantArgs(num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel", group_size=group)
    for bits, symmetric, group in [
        (2, True, 16), (2, False, 16), (3, True, None), (3, False, 16), (4, True, 16), (4, False, None),
        (8, True, None), (8, False, 16),
    ]
]  # fmt: skip


def case_id(args: QuantArgs) -> str:
    return f"int{args.num_bits}-{'sym' if args.symmetric else 'asym'}-{args.group_size or 'channel'}"


def weights(out_features: int, in_features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights with outliers, and the importance of their columns."""
    generator = torch.Generator().manual_seed(seed)
    w_OI = torch.randn(out_features, in_features, generator=generator)
    w_OI *= torch.randn(out_features, in_features, generator=generator).exp()
    return w_OI, torch.rand(in_features, generator=generator).square()


def naive_error(w_i: Tensor, gram_ii: Tensor, scale: float, zero: int, args: QuantArgs) -> float:
    """Weighted squared error of one group, float64."""
    q_i = (w_i / scale + zero).round().clamp(args.qmin, args.qmax)
    delta_i = w_i - (q_i - zero) * scale
    return float(delta_i @ gram_ii @ delta_i)


def naive_search(w_i: Tensor, gram_ii: Tensor, args: QuantArgs) -> tuple[float, float, int]:
    """The least error over the grid, and its scale and zero point; every group on its own, float64."""
    best = (float("inf"), 0.0, 0)
    narrowest = {2: 0.30, 3: 0.45, 4: 0.60}.get(args.num_bits, 0.8)
    for p in torch.linspace(1.0, narrowest, 32).double().tolist():
        low, high = float(w_i.min()) * p, float(w_i.max()) * p
        steps = 2**args.num_bits - 1
        if not args.symmetric:
            high = max(high, 0.0)
            low = min(low, -high / (steps - 1))
        width = 2 * max(abs(low), abs(high)) if args.symmetric else high - low
        scale = float(torch.tensor(width / steps, dtype=torch.float64).bfloat16())
        zero = 0
        if not args.symmetric:
            zero = min(max(round(args.qmin - low / scale), args.qmin + 1), args.qmax)
        error = naive_error(w_i, gram_ii, scale, zero, args)
        if error < best[0]:
            best = (error, scale, zero)
    return best


def gram_of(h_I: Tensor, seed: int) -> Tensor:
    """A Gram matrix with this diagonal and strong cross terms."""
    x_NI = torch.randn(12, len(h_I), generator=torch.Generator().manual_seed(seed)) + 1
    gram_II = x_NI.t() @ x_NI
    ratio_I = (h_I / gram_II.diagonal()).sqrt()
    return gram_II * ratio_I * ratio_I[:, None]


@pytest.mark.parametrize("cross", [False, True], ids=["diagonal", "gram"])
@pytest.mark.parametrize("args", CASES, ids=case_id)
def test_search_equals_brute_force(args: QuantArgs, cross: bool) -> None:
    w_OI, h_I = weights(7, 48, args.num_bits)
    gram_II = gram_of(h_I, 1) if cross else h_I.diag()
    scale_OG, zero_OG = search_qparams(w_OI, gram_II if cross else h_I, args)
    size = args.group_size or 48
    assert scale_OG.shape == (7, 48 // size)
    assert (zero_OG is None) == args.symmetric
    same = 0
    for o, g in torch.cartesian_prod(torch.arange(7), torch.arange(48 // size)).tolist():
        part = slice(g * size, (g + 1) * size)
        w_i, gram_ii = w_OI[o, part].double(), gram_II[part, part].double()
        least, scale, zero = naive_search(w_i, gram_ii, args)
        found = (float(scale_OG[o, g]), 0 if zero_OG is None else int(zero_OG[o, g]))
        assert naive_error(w_i, gram_ii, *found, args) == pytest.approx(least, rel=1e-4)
        same += found == (scale, zero)
    assert same >= 0.9 * scale_OG.numel()  # the rest are ties to float32 rounding


def test_no_weighting_counts_columns_alike_and_long_groups_only_by_the_diagonal() -> None:
    args = QuantArgs(num_bits=4, strategy="channel")
    w_OI, h_I = weights(5, 288, 3)
    gram_II = gram_of(h_I, 2)
    for plain, same in ((None, torch.ones(288)), (gram_II, gram_II.diagonal())):
        assert torch.equal(search_qparams(w_OI, plain, args)[0], search_qparams(w_OI, same, args)[0])
    assert not torch.equal(search_qparams(w_OI, None, args)[0], search_qparams(w_OI, h_I, args)[0])


def test_cross_terms_change_the_choice() -> None:
    args = QuantArgs(num_bits=3, strategy="group", group_size=16)
    w_OI, h_I = weights(64, 48, 4)
    gram_II = gram_of(h_I, 5)
    errors = {}
    for name, weighting in (("gram", gram_II), ("diagonal", h_I)):
        scale_OG, _ = search_qparams(w_OI, weighting, args)
        w_OGi = w_OI.view(64, 3, 16)
        delta_OI = ((w_OGi / scale_OG[..., None]).round().clamp(-4, 3) * scale_OG[..., None] - w_OGi).view_as(w_OI)
        parts = [
            delta_OI[:, g : g + 16] @ gram_II[g : g + 16, g : g + 16] * delta_OI[:, g : g + 16] for g in (0, 16, 32)
        ]
        errors[name] = float(sum(part.sum() for part in parts))
    assert errors["gram"] < errors["diagonal"]


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans(), seed=st.integers(0, 9999))
def test_search_is_never_worse_than_the_plain_range(bits: int, symmetric: bool, seed: int) -> None:
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=16)
    w_OI, h_I = weights(5, 64, seed)
    w_OI[0, :16] = 0
    searched, plain = search_qparams(w_OI, h_I, args), minmax_qparams(w_OI, args)
    errors = []
    for scale_OG, zero_OG in (searched, plain):
        scale_OI = scale_OG.repeat_interleave(16, 1).double()
        zero_OI = 0.0 if zero_OG is None else zero_OG.repeat_interleave(16, 1).double()
        q_OI = (w_OI.double() / scale_OI + zero_OI).round().clamp(args.qmin, args.qmax)
        error_OI = h_I.double() * (w_OI.double() - (q_OI - zero_OI) * scale_OI) ** 2
        errors.append(error_OI.view(5, 4, 16).sum(-1))
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
    if bits <= 4:
        assert errors[0].sum() < errors[1].sum()


def test_the_importance_decides() -> None:
    args = QuantArgs(num_bits=3, strategy="group", group_size=16)
    w_OI = torch.linspace(-1, 1, 16).repeat(1, 1)
    w_OI[0, 0] = -4.0
    without_outlier, outlier_only = torch.ones(16), torch.zeros(16)
    without_outlier[0], outlier_only[0] = 0.0, 1.0
    narrow, _ = search_qparams(w_OI, without_outlier, args)
    wide, _ = search_qparams(w_OI, outlier_only, args)
    assert narrow < 0.6 * wide


def test_rows_are_independent_of_the_chunk_they_are_in() -> None:
    args = QuantArgs(num_bits=4, symmetric=False, strategy="group", group_size=2048)
    w_OI, h_I = weights(40, 4096, 0)  # several chunks
    scale_OG, zero_OG = search_qparams(w_OI, h_I, args)
    assert zero_OG is not None
    for o in (0, 15, 16, 39):
        scale_1G, zero_1G = search_qparams(w_OI[o : o + 1], h_I, args)
        assert zero_1G is not None
        assert torch.equal(scale_1G[0], scale_OG[o])
        assert torch.equal(zero_1G[0], zero_OG[o])


def test_one_scale_for_a_tensor_is_not_searched() -> None:
    args = QuantArgs(num_bits=4, strategy="tensor")
    w_OI, h_I = weights(3, 16, 0)
    scale, zero = search_qparams(w_OI, h_I, args)
    assert zero is None
    assert scale.shape == (1, 1)
    assert float(scale) == float((w_OI.abs().max() / 7.5).bfloat16())
