"""AWQ: the loss is the output's error on data, the choice is the least of the grid, and none is in it."""

import pytest
import torch
from torch import Tensor

from compress.methods.awq import AwqConfig, Readers, candidate, output_error, relative_magnitude, search_scale, solve
from compress.numerics import dequantize
from compress.schemes import PRESETS, QuantArgs

ARGS = PRESETS["W4A16"].with_group_size(32).weights
ASYM = PRESETS["W4A16_ASYM"].with_group_size(32).weights
CONFIG = AwqConfig(scheme="W4A16", grid=10)


def drawn(seed: int = 0, rows: int = 48, width: int = 64, tokens: int = 200) -> tuple[Tensor, Tensor]:
    """Weights, and inputs of which a few channels are large."""
    source = torch.Generator().manual_seed(seed)
    x_NI = torch.randn(tokens, width, generator=source)
    x_NI[:, ::11] *= 20
    return torch.randn(rows, width, generator=source), x_NI


def gram(x_NI: Tensor) -> Tensor:
    return x_NI.t() @ x_NI / len(x_NI)


def rounded(w_OI: Tensor, args: QuantArgs) -> Tensor:
    """Plain rounding in float64 on bfloat16 scales, written out."""
    codes = 2**args.num_bits
    out = torch.empty_like(w_OI, dtype=torch.float64)
    for o, row in enumerate(w_OI.double()):
        for g in range(0, len(row), 32):
            values = row[g : g + 32]
            if args.symmetric:
                step = (values.abs().max() / ((codes - 1) / 2)).bfloat16().double()
                out[o, g : g + 32] = (values / step).round().clamp(-codes // 2, codes // 2 - 1) * step
            else:
                high = max(float(values.max()), 0)
                low = min(float(values.min()), -high / (2**args.num_bits - 2))
                step = torch.tensor((high - low) / (codes - 1)).bfloat16().double()
                zero = (-codes // 2 - low / step).round().clamp(-codes // 2, codes // 2 - 1)
                code = (values / step + zero).round().clamp(-codes // 2, codes // 2 - 1)
                out[o, g : g + 32] = (code - zero) * step
    return out


@pytest.mark.parametrize("args", [ARGS, ASYM])
def test_the_loss_is_the_outputs_error_on_data(args: QuantArgs) -> None:
    w_OI, x_NI = drawn()
    scale_I = torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.5
    delta_OI = rounded(w_OI * scale_I, args) / scale_I.double() - w_OI.double()
    wanted = float((x_NI.double() @ delta_OI.t()).square().sum() / len(x_NI))
    assert output_error(w_OI, w_OI * scale_I, gram(x_NI), args, scale_I) == pytest.approx(wanted, rel=2e-3)


def test_the_choice_is_the_least_of_the_grid() -> None:
    w_OI, x_NI = drawn()
    gram_II = gram(x_NI)
    x_I, w_I = gram_II.diagonal().sqrt(), relative_magnitude(w_OI, ARGS)
    losses = {
        (r, duo): output_error(w_OI, w_OI * s, gram_II, ARGS, s)
        for duo in (False, True)
        for r in torch.linspace(0, 1, 11).tolist()
        for s in [candidate(x_I, w_I, r, duo)]
    }
    found = search_scale(w_OI, gram_II, ARGS, CONFIG)
    assert found.loss == pytest.approx(min(losses.values()))
    assert found.loss < 0.7 * found.loss_without  # large channels are worth protecting
    plain = search_scale(w_OI, gram_II, ARGS, CONFIG.model_copy(update={"duo_scaling": False}))
    assert plain.loss == pytest.approx(min(loss for (_, duo), loss in losses.items() if not duo))


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_none(seed: int) -> None:
    w_OI, x_NI = drawn(seed)
    for x in (x_NI, torch.ones_like(x_NI), x_NI * 1e-6):
        found = search_scale(w_OI, gram(x), ARGS, CONFIG)
        assert found.loss <= found.loss_without
        assert bool((found.scale_C.isfinite() & (found.scale_C > 0)).all())


def test_dead_channels_keep_their_scale_and_a_dead_input_asks_for_none() -> None:
    w_OI, x_NI = drawn()
    x_NI[:, 5] = 0
    found = search_scale(w_OI, gram(x_NI), ARGS, CONFIG)
    assert found.scale_C[5] == 1
    nothing = search_scale(w_OI, torch.zeros(64, 64), ARGS, CONFIG)
    assert (nothing.name, nothing.loss) == ("none", 0)


def test_what_is_not_finite_is_refused() -> None:
    w_OI, x_NI = drawn()
    w_OI[3, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        search_scale(w_OI, gram(x_NI), ARGS, CONFIG)
    with pytest.raises(ValueError, match="not finite"):
        solve(w_OI, gram(x_NI), ARGS, CONFIG)


def test_channels_that_are_read_twice_have_one_scale() -> None:
    """Columns i and i + 32 read channel i."""
    w_OI, x_NI = drawn()
    readers = Readers(lambda x: x.view(2, 32).mean(0), lambda s: s.repeat(2))
    found = search_scale(w_OI, gram(x_NI), ARGS, CONFIG, readers)
    assert found.scale_C.shape == (32,)
    scale_I = found.scale_C.repeat(2)
    assert found.loss == pytest.approx(output_error(w_OI, w_OI * scale_I, gram(x_NI), ARGS, scale_I))


@pytest.mark.parametrize("args", [ARGS, ASYM])
def test_the_search_for_ranges_helps(args: QuantArgs) -> None:
    w_OI, x_NI = drawn()
    with_search = solve(w_OI, gram(x_NI), args, CONFIG)
    without = solve(w_OI, gram(x_NI), args, CONFIG.model_copy(update={"scale_search": False}))
    assert with_search.loss < without.loss
    delta_OI = (dequantize(with_search) - w_OI).double()
    wanted = float((x_NI.double() @ delta_OI.t()).square().sum() / len(x_NI))
    assert with_search.loss == pytest.approx(wanted, rel=1e-3)
