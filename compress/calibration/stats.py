"""What a calibration pass leaves behind of a layer's inputs.

Left out: per-token norms and third moments; nothing here needs them.
"""

import torch
from torch import Tensor

from compress.numerics import bf16_products, has_bf16_matrix_unit

_PANEL = 256  # columns of the Gram matrix computed at a time: the lower triangle is never computed


class Gram:
    """XᵀX / N of everything that went through a layer, float32 [I, I], and the count of tokens.

    Only the upper triangle is accumulated, panel by panel. Where the CPU multiplies bfloat16 tiles in
    hardware, inputs are rounded to bfloat16 (as a bfloat16 runtime sees them) and multiplied there, which is
    exact for such values; the sum is float32 everywhere.
    """

    def __init__(self, in_features: int) -> None:
        self._sum_II = torch.zeros(in_features, in_features)
        self._whole = False
        self.tokens = 0

    def update(self, x: Tensor) -> None:
        """Adds inputs [..., I]; padding must have been taken out."""
        x_NI = x.reshape(-1, x.shape[-1]).float()
        if has_bf16_matrix_unit():
            x_NI = x_NI.bfloat16().float()
        with bf16_products():
            for start in range(0, x_NI.shape[1], _PANEL):
                end = start + _PANEL
                self._sum_II[start:end, start:].addmm_(x_NI[:, start:end].t(), x_NI[:, start:])
        self.tokens += len(x_NI)

    def rescale(self, scale_I: Tensor) -> None:
        """The matrix of inputs that were divided by `scale_I`."""
        self._sum_II.div_(scale_I.unsqueeze(0)).div_(scale_I.unsqueeze(1))

    def matrix(self) -> Tensor:
        """The symmetric matrix, zero when no token was seen; ends the accumulation."""
        if self._whole:
            return self._sum_II
        self._whole = True
        mean_II = self._sum_II.div_(max(1, self.tokens))
        for start in range(0, len(mean_II), _PANEL):  # mirrored in place: no second matrix is made
            end = start + _PANEL
            corner = mean_II[start:end, start:end]
            corner.copy_(corner.triu() + corner.triu(1).t())
            mean_II[end:, start:end] = mean_II[start:end, end:].t()
        return mean_II


class InputStatistics:
    """What is gathered of an input that several layers read.

    Attributes:
        gram: the Gram matrix, None when nobody asks for it.
        largest_I: the largest magnitude of each channel, float32 [I]; zero when no token was seen.
    """

    def __init__(self, in_features: int, gram: bool) -> None:
        self.gram = Gram(in_features) if gram else None
        self.largest_I = torch.zeros(in_features)

    def update(self, x: Tensor) -> None:
        """Adds inputs [..., I]; what is not finite stays in `largest_I`."""
        if self.gram is not None:
            self.gram.update(x)
        if x.numel():
            self.largest_I = torch.maximum(self.largest_I, x.reshape(-1, x.shape[-1]).abs().amax(0).float())

    def rescale(self, scale_I: Tensor) -> None:
        """What they would be had the input been divided by `scale_I`: G becomes D⁻¹ G D⁻¹."""
        self.largest_I = self.largest_I / scale_I
        if self.gram is not None:
            self.gram.rescale(scale_I)
