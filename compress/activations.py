"""Layers whose inputs are quantized: the one place where a module is made to round what its linear layers read.

Used alike by the walk, whose compressed chain goes through such layers, and by an artifact that is decoded from
disk, so that both compute what the format says. Plain transformers rounds by itself; that it agrees is what
verification shows.

A layer's rounding is a forward pre-hook that does nothing until it is switched on: the walk hangs it there before a
weight is solved, since a hook that is added during a layer's own call would miss that call.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from compress.numerics import quantize_activations
from compress.schemes import QuantArgs, Scheme


class QuantizedInput:
    """A linear layer's pre-hook: its input, coded and decoded, once it is switched on.

    Attributes:
        args: how inputs are coded.
        scale: float32 [1] of static inputs.
        on: whether it does anything yet.
    """

    def __init__(self, args: QuantArgs) -> None:
        self.args = args
        self.scale: Tensor | None = None
        self.on = False

    def switch_on(self, scale: Tensor | None) -> None:
        """From now on inputs are rounded; `scale` float32 [1] for static ones, else None."""
        assert (scale is None) == self.args.dynamic
        self.scale, self.on = scale, True

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The hook; None leaves the inputs as they are."""
        del module
        if not self.on:
            return None
        return (quantize_activations(inputs[0], self.args, self.scale), *inputs[1:])


def wire_inputs(module: nn.Module, name: str, schemes: Mapping[str, Scheme]) -> dict[str, QuantizedInput]:
    """Hangs a rounding, switched off, in front of every layer of `module` whose scheme codes inputs.

    Args:
        name: the module's full name.
        schemes: of linear layers, by full name; those outside the module are passed over.
    Returns:
        The roundings by the layers' full names.
    """
    wired = {}
    for layer, scheme in schemes.items():
        if scheme.input_activations is not None and layer.startswith(name + "."):
            wired[layer] = QuantizedInput(scheme.input_activations)
            module.get_submodule(layer[len(name) + 1 :]).register_forward_pre_hook(wired[layer])
    return wired
