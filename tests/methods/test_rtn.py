"""Round to nearest against a float64 version that takes every value on its own."""

import pytest
import torch
from torch import Tensor

from compress.methods import METHODS
from compress.methods.rtn import RTN, RtnConfig, solve
from compress.numerics import QuantizedWeight, dequantize
from compress.schemes import QuantArgs, Scheme, Strategy
from compress.tables import resolve

GRAINS: list[tuple[Strategy, int | None]] = [("tensor", None), ("channel", None), ("group", 8)]
SHAPE = (5, 24)


def weights(seed: int = 0) -> Tensor:
    w_OI = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    w_OI[1] += 3  # a row without zero in its range
    w_OI[2, :8] = 0
    return w_OI


def naive_rtn(w_OI: Tensor, args: QuantArgs) -> tuple[Tensor, Tensor]:
    """Codes and values, float64, one range at a time."""
    q_OI, values_OI = torch.zeros(SHAPE, dtype=torch.int64), torch.zeros(SHAPE, dtype=torch.float64)
    out_features, in_features = SHAPE
    rows = {"tensor": [slice(0, out_features)]}.get(args.strategy, [slice(o, o + 1) for o in range(out_features)])
    size = args.group_size or in_features
    for row in rows:
        for start in range(0, in_features, size):
            at = (row, slice(start, start + size))
            w = w_OI[at].double()
            low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
            if not args.symmetric:  # room for one step below zero
                low = min(low, -high / (2**args.num_bits - 2))
            width = 2 * max(-low, high) if args.symmetric else high - low
            width = max(width, 2.0**-100)
            scale = float(torch.tensor(width / (2**args.num_bits - 1), dtype=torch.float64).bfloat16())
            zero = 0 if args.symmetric else min(max(round(args.qmin - low / scale), args.qmin + 1), args.qmax)
            q = (w / scale + zero).round().clamp(args.qmin, args.qmax)
            q_OI[at], values_OI[at] = q.to(torch.int64), (q - zero) * scale
    return q_OI, values_OI


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group_size"), GRAINS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_equals_the_naive_version(bits: int, strategy: Strategy, group_size: int | None, symmetric: bool) -> None:
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
    w_OI = weights()
    before_OI = w_OI.clone()
    coded = solve(w_OI, None, args, RtnConfig(scheme="W4A16"))
    q_OI, values_OI = naive_rtn(w_OI, args)
    live_OI = before_OI != 0  # the code of an all-zero group depends on its arbitrary scale
    assert torch.equal(coded.q_OI[live_OI].to(torch.int64), q_OI[live_OI])
    torch.testing.assert_close(dequantize(coded).double(), values_OI, rtol=1e-6, atol=1e-20)
    assert coded.loss == pytest.approx(float((values_OI - w_OI.double()).square().sum()), rel=1e-5)
    assert torch.equal(w_OI, before_OI)
    assert coded.scale.shape == {"tensor": (1, 1), "channel": (5, 1), "group": (5, 3)}[strategy]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scale_search_lowers_the_error_of_every_group(bits: int, symmetric: bool) -> None:
    args = QuantArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=8)
    w_OI = weights()
    plain = solve(w_OI, None, args, RtnConfig(scheme="W4A16"))
    searched = solve(w_OI, None, args, RtnConfig(scheme="W4A16", scale_search=True))
    errors = [(dequantize(c) - w_OI).square().view(5, 3, 8).sum(-1) for c in (plain, searched)]
    assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())
    assert searched.loss < plain.loss


def test_is_data_free_and_plain_by_default() -> None:
    assert resolve(METHODS, "rtn", kind="method") is RTN
    assert RTN.statistics is None
    assert not RtnConfig(scheme="W4A16").scale_search


class Block:
    """What the step asks of a block."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.coded: dict[str, QuantizedWeight] = {}

    def in_order(self) -> list[list[str]]:
        return [["a", "b"]]

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def set(self, names: list[str], coded: QuantizedWeight) -> None:
        self.coded.update(dict.fromkeys(names, coded))


def test_step_rounds_every_row_by_its_own_scheme() -> None:
    block = Block({"a": weights(0), "b": weights(1), "dense": weights(2)})
    rows = {n: Scheme(weights=QuantArgs(num_bits=b)) for n, b in (("a", 3), ("b", 8))}
    config = RtnConfig(scheme="W4A16")
    RTN.step(block, rows, config)
    assert block.coded.keys() == rows.keys()
    for name, scheme in rows.items():
        alone = solve(block.weights[name], None, scheme.weights, config)
        assert torch.equal(block.coded[name].q_OI, alone.q_OI)
