"""SmoothQuant: equation 4 by hand, and the cost that chooses alpha."""

import pytest
import torch

from compress.methods.smoothquant import SmoothQuantConfig, cost, smoothing_scale
from compress.schemes import PRESETS

ARGS = PRESETS["W8A8"].weights


def test_equation_4_by_hand() -> None:
    w_OI = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -0.5]])
    largest_I = torch.tensor([16.0, 8.0, 0.5])
    assert smoothing_scale(w_OI, largest_I, 0.5).tolist() == pytest.approx([4.0, 2.0, 1.0])
    assert smoothing_scale(w_OI, largest_I, 1.0).tolist() == pytest.approx([16.0, 8.0, 0.5])
    assert smoothing_scale(w_OI, largest_I, 0.0).tolist() == pytest.approx([1.0, 0.5, 2.0])


def test_dead_channels_keep_their_scale() -> None:
    w_OI = torch.tensor([[1.0, 0.0, 1.0]])
    found = smoothing_scale(w_OI, torch.tensor([0.0, 4.0, 4.0]), 0.5)
    assert found.tolist() == [1, 1, 2]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_the_ranges_are_shared_as_alpha_says(alpha: float) -> None:
    """After smoothing, channel ranges are max|X|^(1−α) max|W|^(1−α) and max|X|^α max|W|^α."""
    source = torch.Generator().manual_seed(0)
    w_OI, largest_I = torch.randn(8, 16, generator=source), torch.rand(16, generator=source) * 50 + 0.1
    scale_I = smoothing_scale(w_OI, largest_I, alpha)
    together_I = largest_I * w_OI.abs().amax(0)
    torch.testing.assert_close(largest_I / scale_I, together_I ** (1 - alpha))
    torch.testing.assert_close((w_OI * scale_I).abs().amax(0), together_I**alpha)


def test_the_estimated_cost_finds_a_better_alpha_than_either_end() -> None:
    """Outliers in the inputs: some smoothing costs less than none and than all."""
    source = torch.Generator().manual_seed(1)
    x_NI = torch.randn(500, 64, generator=source)
    x_NI[:, 3] *= 60
    w_OI = torch.randn(48, 64, generator=source) / 8
    gram_II, largest_I = x_NI.t() @ x_NI / 500, x_NI.abs().amax(0)

    def estimated(alpha: float) -> float:
        return cost(w_OI, gram_II, largest_I, smoothing_scale(w_OI, largest_I, alpha), ARGS)

    def measured(alpha: float) -> float:
        scale_I = smoothing_scale(w_OI, largest_I, alpha)
        x, w = x_NI / scale_I, w_OI * scale_I
        step_N1, step_O1 = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(1, keepdim=True) / 127.5
        output = ((x / step_N1).round() * step_N1) @ ((w / step_O1).round() * step_O1).t()
        return float((output - x_NI @ w_OI.t()).square().sum() / 500)

    for choice in (estimated, measured):
        assert choice(0.5) < choice(0.0)
        assert choice(0.5) < choice(1.0)


def test_alpha_is_a_share_or_auto() -> None:
    assert SmoothQuantConfig(alpha="auto").alpha == "auto"
    with pytest.raises(ValueError, match="less than or equal to 1"):
        SmoothQuantConfig(alpha=1.5)
