"""GPTQ against the paper's own recursion in float64, and what holds whatever the weights."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from compress.methods import rtn
from compress.methods.gptq import GPTQ, GptqConfig, inverse_cholesky, solve
from compress.methods.scale_search import minmax_qparams
from compress.numerics import QuantizedWeight, dequantize, quantize
from compress.schemes import PRESETS, QuantArgs, Scheme

Actorder = Literal["static"] | None


def settings_of(damping: float = 0.01, **keys: Any) -> GptqConfig:
    return GptqConfig(scheme="W4A16", damping=damping, **keys)


def args_of(bits: int, group: int | None, symmetric: bool = True) -> QuantArgs:
    strategy: Literal["group", "channel"] = "group" if group else "channel"
    return QuantArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group)


def problem(out_features: int, in_features: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights, and the Gram matrix of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    w_OI = torch.randn(out_features, in_features, generator=generator)
    mix_II = torch.randn(in_features, in_features, generator=generator) / in_features**0.5
    x_NI = torch.randn(4 * in_features, in_features, generator=generator)
    x_NI = x_NI @ (mix_II + 0.5 * torch.eye(in_features)) + 0.5 * x_NI[:, :1]
    x_NI *= torch.randn(in_features, generator=generator).mul(0.7).exp()
    return w_OI, x_NI.t() @ x_NI / len(x_NI)


def damped(gram_II: Tensor, damping: float = 0.01) -> Tensor:
    """G + λI in float64; a dead column has the mean of the live ones on its diagonal."""
    gram_II = gram_II.double().clone()
    diagonal_I = gram_II.diagonal().clone()
    mean = diagonal_I[diagonal_I > 0].mean()
    gram_II.diagonal().add_(damping * mean + (diagonal_I <= 0) * mean)
    return gram_II


def trace(delta_OI: Tensor, gram_II: Tensor) -> float:
    """tr(ΔW G ΔWᵀ) in float64."""
    delta_OI = delta_OI.double()
    return float((delta_OI @ gram_II.double() * delta_OI).sum())


def eliminations(gram_II: Tensor, order: list[int]) -> Iterator[tuple[int, Tensor]]:
    """The columns in order, each with the inverse Hessian of those not yet rounded; others' rows are zero."""
    inverse_II = torch.linalg.inv(damped(gram_II))
    for i in order:
        yield i, inverse_II
        inverse_II = inverse_II - torch.outer(inverse_II[:, i], inverse_II[i]) / inverse_II[i, i]


def naive_range(w_Oi: Tensor, h_i: Tensor | None, args: QuantArgs) -> tuple[Tensor, Tensor]:
    """Scale and zero point [O] of one group, float64; with `h_i`, those of least weighted error on the grid."""
    narrowest = {2: 0.30, 3: 0.45, 4: 0.60}.get(args.num_bits, 0.8)
    best_O = torch.full((len(w_Oi),), torch.inf, dtype=torch.float64)
    best_scale_O, best_zero_O = best_O.clone(), best_O.clone()
    for p in [1.0] if h_i is None else torch.linspace(1.0, narrowest, 32).tolist():
        low_O, high_O = w_Oi.amin(1).clamp_max(0) * p, w_Oi.amax(1).clamp_min(0) * p
        if not args.symmetric:  # room for one step below zero
            low_O = torch.minimum(low_O, -high_O / (2**args.num_bits - 2))
        width_O = 2 * torch.maximum(-low_O, high_O) if args.symmetric else high_O - low_O
        scale_O = (width_O / (2**args.num_bits - 1)).bfloat16().double()
        zero_O = (args.qmin - low_O / scale_O).round().clamp(args.qmin + 1, args.qmax)
        zero_O = torch.zeros_like(scale_O) if args.symmetric else zero_O
        q_Oi = (w_Oi / scale_O[:, None] + zero_O[:, None]).round().clamp(args.qmin, args.qmax)
        delta_Oi = (q_Oi - zero_O[:, None]) * scale_O[:, None] - w_Oi
        error_O = (delta_Oi**2 * (1.0 if h_i is None else h_i)).sum(1)
        better_O = error_O < best_O
        best_O = torch.where(better_O, error_O, best_O)
        best_scale_O = torch.where(better_O, scale_O, best_scale_O)
        best_zero_O = torch.where(better_O, zero_O, best_zero_O)
    return best_scale_O, best_zero_O


def naive_gptq(
    w_OI: Tensor, gram_II: Tensor, args: QuantArgs, actorder: Actorder, search: bool
) -> tuple[Tensor, Tensor]:
    """The paper's equations 2 and 3, a column at a time: codes and values [O, I], float64.

    No Cholesky factor and no batches: the inverse of the remaining columns comes by Gaussian elimination.
    """
    w_OI = w_OI.double().clone()
    in_features = w_OI.shape[1]
    size = args.group_size or in_features
    order = list(range(in_features))
    if actorder == "static":
        order.sort(key=lambda i: -float(gram_II[i, i]))
    h_I = gram_II.double().diagonal()

    def fit(group: int) -> tuple[Tensor, Tensor]:
        columns = slice(group * size, (group + 1) * size)
        return naive_range(w_OI[:, columns], h_I[columns] if search else None, args)

    ranges = [fit(g) for g in range(in_features // size)]
    q_OI, values_OI = torch.empty_like(w_OI), torch.empty_like(w_OI)
    for i, inverse_II in eliminations(gram_II, order):
        if actorder is None and i % size == 0:
            ranges[i // size] = fit(i // size)
        scale_O, zero_O = ranges[i // size]
        q_OI[:, i] = (w_OI[:, i] / scale_O + zero_O).round().clamp(args.qmin, args.qmax)
        values_OI[:, i] = (q_OI[:, i] - zero_O) * scale_O
        w_OI -= torch.outer((w_OI[:, i] - values_OI[:, i]) / inverse_II[i, i], inverse_II[i])
    return q_OI, values_OI


def assert_equals_naive(w_OI: Tensor, gram_II: Tensor, args: QuantArgs, actorder: Actorder, search: bool) -> None:
    coded = solve(w_OI, gram_II, args, settings_of(actorder=actorder, scale_search=search))
    q_OI, values_OI = naive_gptq(w_OI, gram_II, args, actorder, search)
    other = int((coded.q_OI != q_OI).sum())
    assert other <= 0.002 * q_OI.numel(), f"{other} of {q_OI.numel()} codes differ"
    naive_loss = trace(values_OI - w_OI.double(), damped(gram_II))
    assert trace(dequantize(coded) - w_OI, damped(gram_II)) == pytest.approx(naive_loss, rel=1e-4)
    assert coded.loss == pytest.approx(naive_loss, rel=1e-4)


@pytest.mark.parametrize("search", [True, False], ids=["search", "plain"])
@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("bits", "group"), [(2, 8), (3, None), (4, 16), (8, None)])
def test_equals_the_naive_version(
    bits: int, group: int | None, symmetric: bool, actorder: Actorder, search: bool
) -> None:
    w_OI, gram_II = problem(12, 48, seed=bits)
    assert_equals_naive(w_OI, gram_II, args_of(bits, group, symmetric), actorder, search)


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize(
    ("in_features", "group"), [(128, None), (130, None), (257, None), (256, 64), (192, 96), (256, 256)]
)
def test_lazy_blocks_leave_no_seam(in_features: int, group: int | None, actorder: Actorder) -> None:
    w_OI, gram_II = problem(4, in_features)
    assert_equals_naive(w_OI, gram_II, args_of(3, group), actorder, search=False)


def test_one_scale_for_a_tensor() -> None:
    w_OI, gram_II = problem(6, 32)
    args = QuantArgs(num_bits=4, strategy="tensor")
    coded = solve(w_OI, gram_II, args, settings_of())
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16"))
    assert torch.equal(coded.scale, nearest.scale)
    assert coded.scale.shape == (1, 1)
    assert trace(dequantize(coded) - w_OI, gram_II) < trace(dequantize(nearest) - w_OI, gram_II)


FLOATS = {name: s.weights for name, s in PRESETS.items() if s.weights.type == "float"}


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("name", FLOATS)
def test_float_codes_equal_the_naive_version(name: str, actorder: Actorder) -> None:
    """Equations 2 and 3 in float64 on the scales that it chose."""
    args = FLOATS[name]
    w_OI, gram_II = problem(128, 128, seed=3)
    coded = solve(w_OI, gram_II, args, settings_of(actorder=actorder, scale_search=False))
    if actorder == "static" or args.group_size is None:
        assert torch.equal(coded.scale, minmax_qparams(w_OI, args)[0])
    assert (coded.global_scale is None) == (args.strategy != "tensor_group")
    scale_OI = coded.scale.double().repeat_interleave(128 // coded.scale.shape[1], 1).expand(128, 128)
    order = sorted(range(128), key=lambda i: -float(gram_II[i, i])) if actorder else list(range(128))
    left_OI, q_OI = w_OI.double().clone(), torch.empty(128, 128)
    for i, inverse_II in eliminations(gram_II, order):
        q_OI[:, i] = quantize(left_OI[:, i], scale_OI[:, i], 0.0, args).float()
        error_O = left_OI[:, i] - q_OI[:, i].double() * scale_OI[:, i]
        left_OI -= torch.outer(error_O / inverse_II[i, i], inverse_II[i])
    assert int((coded.q_OI.float() != q_OI).sum()) <= 0.01 * q_OI.numel()
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16"))
    assert trace(dequantize(coded) - w_OI, gram_II) < trace(dequantize(nearest) - w_OI, gram_II)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    group=st.sampled_from([None, 16]),
    seed=st.integers(0, 9999),
)
def test_beats_rounding_to_nearest_on_the_same_scales(bits: int, symmetric: bool, group: int | None, seed: int) -> None:
    w_OI, gram_II = problem(8, 32, seed)
    args = args_of(bits, group, symmetric)
    coded = solve(w_OI, gram_II, args, settings_of(scale_search=False))
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16"))
    assert torch.equal(coded.scale, nearest.scale)
    assert trace(dequantize(coded) - w_OI, gram_II) < trace(dequantize(nearest) - w_OI, gram_II)


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("search", [True, False])
def test_uncorrelated_inputs_make_it_rounding_to_nearest(search: bool, actorder: Actorder) -> None:
    w_OI, _ = problem(8, 48)
    args = args_of(3, 16, symmetric=False)
    coded = solve(w_OI, torch.eye(48), args, settings_of(actorder=actorder, scale_search=search))
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16", scale_search=search))
    assert coded.zero is not None
    assert nearest.zero is not None
    assert torch.equal(coded.q_OI, nearest.q_OI)
    assert torch.equal(coded.scale, nearest.scale)
    assert torch.equal(coded.zero, nearest.zero)


@settings(max_examples=20, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans(), seed=st.integers(0, 9999))
def test_searched_scales_weigh_columns_by_the_diagonal(bits: int, symmetric: bool, seed: int) -> None:
    w_OI, gram_II = problem(8, 32, seed)
    args = args_of(bits, 16, symmetric)
    h_I = gram_II.double().diagonal()
    errors = []
    for search in (True, False):
        coded = solve(w_OI, gram_II, args, settings_of(scale_search=search))
        scale_OI = coded.scale.repeat_interleave(16, 1).double()
        zero_OI = 0.0 if coded.zero is None else coded.zero.repeat_interleave(16, 1).double()
        q_OI = (w_OI.double() / scale_OI + zero_OI).round().clamp(args.qmin, args.qmax)
        error_OI = h_I * (w_OI.double() - (q_OI - zero_OI) * scale_OI) ** 2
        errors.append(error_OI.view(8, 2, 16).sum(-1))
    assert bool((errors[0] <= errors[1] * (1 + 1e-4)).all())


def test_groups_in_order_are_fitted_to_the_updated_weights() -> None:
    w_OI, gram_II = problem(8, 32)
    args = args_of(2, 16)
    plain_OG, _ = minmax_qparams(w_OI, args)
    static = solve(w_OI, gram_II, args, settings_of(scale_search=False))
    assert torch.equal(static.scale, plain_OG)
    in_order = solve(w_OI, gram_II, args, settings_of(actorder=None, scale_search=False))
    # With the first group rounded, the best values for the second follow from the least-squares problem.
    hessian_II = damped(gram_II)
    delta_Oi = (dequantize(in_order) - w_OI)[:, :16].double()
    shift_Oi = torch.linalg.solve(hessian_II[16:, 16:], hessian_II[16:, :16] @ delta_Oi.t()).t()
    updated_OI = w_OI.clone()
    updated_OI[:, 16:] -= shift_Oi.float()
    expected_OG, _ = minmax_qparams(updated_OI, args)
    assert torch.equal(in_order.scale[:, 0], plain_OG[:, 0])
    torch.testing.assert_close(in_order.scale[:, 1], expected_OG[:, 1], rtol=2**-7, atol=0)
    assert float((in_order.scale[:, 1] / plain_OG[:, 1] - 1).abs().max()) > 0.1


@pytest.mark.parametrize("actorder", ["static", None])
def test_reported_loss_is_the_trace_with_the_damped_matrix(actorder: Actorder) -> None:
    w_OI, gram_II = problem(8, 160)
    gram_II[5] = gram_II[:, 5] = 0
    coded = solve(w_OI, gram_II, args_of(3, 32), settings_of(actorder=actorder, damping=0.1))
    expected = trace(dequantize(coded) - w_OI, damped(gram_II, 0.1))
    assert coded.loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("actorder", ["static", None])
def test_dead_columns_are_noted_and_rounded_to_nearest(actorder: Actorder) -> None:
    w_OI, gram_II = problem(8, 32)
    for dead in (3, 17):
        gram_II[dead] = gram_II[:, dead] = 0
    args = args_of(4, None)
    coded = solve(w_OI, gram_II, args, settings_of(actorder=actorder, scale_search=False))
    assert coded.notes == ("dead_columns: 2",)
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16"))
    assert torch.equal(coded.q_OI[:, [3, 17]], nearest.q_OI[:, [3, 17]])
    assert not torch.equal(coded.q_OI, nearest.q_OI)
    assert bool(dequantize(coded).isfinite().all())


def test_inputs_that_were_never_seen_are_rounded_to_nearest() -> None:
    w_OI, _ = problem(8, 32)
    args = args_of(4, 16)
    coded = solve(w_OI, torch.zeros(32, 32), args, settings_of(scale_search=False))
    nearest = rtn.solve(w_OI, None, args, rtn.RtnConfig(scheme="W4A16"))
    assert coded.notes == ("dead_columns: 32",)
    assert torch.equal(coded.q_OI, nearest.q_OI)


def test_a_rank_one_matrix_escalates_the_damping() -> None:
    w_OI, _ = problem(8, 32)
    gram_II = torch.ones(32, 32)
    coded = solve(w_OI, gram_II, args_of(4, None), settings_of(damping=1e-10))
    (note,) = coded.notes
    assert note.startswith("damping: ")
    assert 1e-10 < float(note.removeprefix("damping: ")) <= 1e-2
    assert bool(dequantize(coded).isfinite().all())
    nearest = rtn.solve(w_OI, None, args_of(4, None), rtn.RtnConfig(scheme="W4A16"))
    assert trace(dequantize(coded) - w_OI, gram_II) < trace(dequantize(nearest) - w_OI, gram_II)


@pytest.mark.parametrize(("correlation", "enough"), [(1.05, 0.1), (1.5, 1.0), (9.0, 10.0)])
def test_the_damping_grows_tenfold_until_it_suffices(correlation: float, enough: float) -> None:
    gram_II = torch.tensor([[1.0, correlation], [correlation, 1.0]])  # the lesser eigenvalue is negative
    upper_II, damping = inverse_cholesky(gram_II, 0.01)
    assert damping == pytest.approx(enough)
    inverse_II = torch.linalg.inv(gram_II + damping * torch.eye(2))
    torch.testing.assert_close(upper_II.t() @ upper_II, inverse_II)
    coded = solve(torch.ones(1, 2), gram_II, args_of(4, None), settings_of())
    assert coded.notes == (f"damping: {enough:g}",)


def test_inverse_cholesky_factors_the_inverse() -> None:
    _, gram_II = problem(1, 40)
    gram_II[7] = gram_II[:, 7] = 0
    upper_II, damping = inverse_cholesky(gram_II, 0.01)
    assert damping == 0.01
    assert torch.equal(upper_II, upper_II.triu())
    expected_II = torch.linalg.inv(damped(gram_II)).float()
    torch.testing.assert_close(upper_II.t() @ upper_II, expected_II, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_is_refused(value: float) -> None:
    w_OI, gram_II = problem(4, 16)
    gram_II[2, 9] = gram_II[9, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        solve(w_OI, gram_II, args_of(4, None), settings_of())


def test_a_matrix_beyond_any_damping_is_refused() -> None:
    gram_II = torch.tensor([[1.0, 100.0], [100.0, 1.0]])
    with pytest.raises(ValueError, match="not positive definite"):
        solve(torch.ones(1, 2), gram_II, args_of(4, None), settings_of())


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("group", [None, 16])
def test_inputs_are_never_mutated(group: int | None, actorder: Actorder) -> None:
    w_OI, gram_II = problem(8, 32)
    gram_II[5] = gram_II[:, 5] = 0
    before_OI, before_II = w_OI.clone(), gram_II.clone()
    for symmetric in (True, False):
        solve(w_OI, gram_II, args_of(3, group, symmetric), settings_of(actorder=actorder))
        assert torch.equal(w_OI, before_OI)
        assert torch.equal(gram_II, before_II)


@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order_by_group_is_the_plain_order_of_sorted_columns(symmetric: bool) -> None:
    w_OI, gram_II = problem(24, 64)
    args = args_of(3, 16, symmetric)
    order_I = gram_II.diagonal().argsort(descending=True, stable=True)
    found = solve(w_OI, gram_II, args, settings_of(actorder="group"))
    plain = solve(w_OI[:, order_I], gram_II[order_I][:, order_I], args, settings_of(actorder=None))
    assert torch.equal(found.q_OI[:, order_I], plain.q_OI)
    assert torch.equal(found.scale, plain.scale)
    assert found.g_idx_I is not None
    assert found.g_idx_I[order_I].tolist() == [i // 16 for i in range(64)]
    torch.testing.assert_close(dequantize(found)[:, order_I], dequantize(plain))


def test_defaults_are_the_best_practice() -> None:
    config = GptqConfig(scheme="W4A16")
    assert (config.actorder, config.scale_search, config.damping) == ("static", True, 0.005)
    assert GPTQ.statistics == "gram"
    with pytest.raises(ValidationError, match="actorder"):
        settings_of(actorder="weight")


@dataclasses.dataclass
class Block:
    """What the step asks of a block: two layers that read one input, and one that reads another."""

    weights: dict[str, Tensor]
    inputs: list[tuple[list[str], Tensor]]
    coded: dict[str, tuple[list[str], QuantizedWeight]] = dataclasses.field(default_factory=dict)

    def sublayers(self) -> Iterator[tuple[list[str], Tensor]]:
        yield from self.inputs

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def set(self, names: list[str], coded: QuantizedWeight) -> None:
        self.coded.update({name: (names, coded) for name in names})


def test_step_solves_layers_of_one_input_and_scheme_together() -> None:
    w_OI, gram_II = problem(20, 32)
    weights = {"q": w_OI[:8], "k": w_OI[8:12], "v": w_OI[12:16], "o": w_OI[16:]}
    other_II = problem(1, 32, seed=1)[1]
    block = Block(weights, [(["q", "k", "v"], gram_II), (["o"], other_II)])
    four, eight = Scheme(weights=args_of(4, 16)), Scheme(weights=args_of(8, None))
    rows = {"q": four, "k": four, "v": eight, "o": four}
    GPTQ.step(block, rows, settings_of())
    assert {name: names for name, (names, _) in block.coded.items()} == {
        "q": ["q", "k"], "k": ["q", "k"], "v": ["v"], "o": ["o"],
    }  # fmt: skip
    for name, part_OI, gram in (("q", w_OI[:12], gram_II), ("v", w_OI[12:16], gram_II), ("o", w_OI[16:], other_II)):
        alone = solve(part_OI, gram, rows[name].weights, settings_of())
        assert torch.equal(block.coded[name][1].q_OI, alone.q_OI)


def test_weights_that_are_not_finite_are_refused() -> None:
    w_OI, gram_II = problem(4, 32)
    w_OI[1, 2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        solve(w_OI, gram_II, args_of(4, 16), settings_of())
