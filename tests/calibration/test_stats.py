"""The Gram matrix against float64, over panels, batches and shapes."""

import pytest
import torch
from torch import Tensor

from compress.calibration import stats
from compress.calibration.stats import Gram


def inputs(*shape: int, seed: int = 0) -> Tensor:
    """Correlated inputs that bfloat16 holds exactly, so that a CPU which multiplies bfloat16 agrees too."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x + x[..., :1]).bfloat16().float()


def naive(*batches: Tensor) -> Tensor:
    x_NI = torch.cat([b.reshape(-1, b.shape[-1]) for b in batches]).double()
    return x_NI.t() @ x_NI / len(x_NI)


@pytest.mark.parametrize("in_features", [1, 40, 256, 257, 600])
def test_equals_float64(in_features: int) -> None:
    batches = [inputs(2, 17, in_features), inputs(1, 5, in_features, seed=1), inputs(9, in_features, seed=2)]
    gram = Gram(in_features)
    for batch in batches:
        gram.update(batch)
    matrix_II = gram.matrix()
    assert gram.tokens == 2 * 17 + 5 + 9
    assert matrix_II.dtype == torch.float32
    assert torch.equal(matrix_II, matrix_II.t())
    torch.testing.assert_close(matrix_II.double(), naive(*batches), rtol=1e-5, atol=1e-5)


def test_tokens_count_alike_however_they_are_batched() -> None:
    x_BTI = inputs(4, 10, 300)
    whole, pieces = Gram(300), Gram(300)
    whole.update(x_BTI)
    for x_TI in x_BTI:
        pieces.update(x_TI)
    torch.testing.assert_close(whole.matrix(), pieces.matrix(), rtol=1e-5, atol=1e-5)


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    gram = Gram(4)
    for _ in range(300):  # a bfloat16 sum would stop at 256
        gram.update(torch.ones(1, 1, 4, dtype=torch.bfloat16))
    assert torch.equal(gram.matrix(), torch.ones(4, 4))
    assert gram.tokens == 300


def test_nothing_seen_is_zero() -> None:
    gram = Gram(3)
    assert gram.tokens == 0
    assert torch.equal(gram.matrix(), torch.zeros(3, 3))


def test_inputs_are_left_as_they_were() -> None:
    x_NI = torch.randn(8, 20, generator=torch.Generator().manual_seed(3))
    before_NI = x_NI.clone()
    gram = Gram(20)
    gram.update(x_NI)
    gram.matrix()
    assert torch.equal(x_NI, before_NI)


def test_where_tiles_multiply_inputs_are_rounded_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "has_bf16_matrix_unit", lambda: True)
    x_NI = torch.randn(30, 20, generator=torch.Generator().manual_seed(4))
    gram = Gram(20)
    gram.update(x_NI)
    torch.testing.assert_close(gram.matrix().double(), naive(x_NI.bfloat16().float()), rtol=1e-5, atol=1e-5)
