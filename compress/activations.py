"""Layers whose inputs are quantized, and caches: the one place where a module is made to round its activations.

Used alike by the walk, whose compressed chain goes through such layers, and by an artifact that is decoded from
disk, so that both compute what the format says. Plain transformers rounds by itself; that it agrees is what
verification shows.

A layer's rounding is a forward pre-hook that does nothing until it is switched on: the walk hangs it there before a
weight is solved, since a hook that is added during a layer's own call would miss that call. Keys and values are rounded
by a hook of the attention layer, which puts itself between the layer and its cache.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.numerics import quantize_activations
from compress.schemes import QuantArgs, Scheme

_CACHE_KEYS = ("cache", "past_key_values", "past_key_value")  # what transformers' attention layers call their cache
_KEY_PROJECTIONS = ("k_proj", "qkv_proj")


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
        name: the module's full name; "" for a whole model.
        schemes: of linear layers, by full name; those outside the module are passed over.
    Returns:
        The roundings by the layers' full names.
    """
    wired = {}
    start = f"{name}." if name else ""
    for layer, scheme in schemes.items():
        if scheme.input_activations is not None and layer.startswith(start):
            wired[layer] = QuantizedInput(scheme.input_activations)
            module.get_submodule(layer[len(start) :]).register_forward_pre_hook(wired[layer])
    return wired


class QuantizedCache:
    """An attention layer's pre-hook: keys and values are coded and decoded on their way into the cache.

    It puts itself between the layer and its cache, so that it sees the keys as they are kept: after the rotary
    embedding. Until it is switched on it only watches.

    Attributes:
        args: how keys and values are coded.
        largest: the largest magnitude of keys and of values seen, while off.
        scales: float32 [1] of keys and of values, once on.
    """

    def __init__(self, module: nn.Module, args: QuantArgs) -> None:
        self.args = args
        self.largest = [torch.zeros(()), torch.zeros(())]
        self.scales: tuple[Tensor, Tensor] | None = None
        self._key = next(key for key in _CACHE_KEYS if key in inspect.signature(module.forward).parameters)

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook."""
        del module
        return inputs, {**kwargs, self._key: _Between(self, kwargs.get(self._key))}

    def switch_on(self, scales: tuple[Tensor, Tensor]) -> None:
        """From now on keys and values are rounded; `scales` float32 [1] of each."""
        self.scales = scales

    def round(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache keeps them."""
        if self.scales is None:
            self.largest = [
                torch.maximum(largest, x.abs().amax().float()) for largest, x in zip(self.largest, states, strict=True)
            ]
            return states
        keys, values = (quantize_activations(x, self.args, s) for x, s in zip(states, self.scales, strict=True))
        return keys, values


class _Between:
    """What an attention layer takes for its cache; `cache` is None where nothing is kept."""

    def __init__(self, rounding: QuantizedCache, cache: Any) -> None:
        self._rounding, self._cache = rounding, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rounds, and hands on."""
        states = self._rounding.round((keys, values))
        return states if self._cache is None else self._cache.update(*states, *args, **kwargs)


def attentions(names: Iterable[str]) -> list[str]:
    """The attention layers among linear layers' names: those that project keys."""
    found = (name.rpartition(".") for name in names)
    return list(dict.fromkeys(parent for parent, _, leaf in found if leaf in _KEY_PROJECTIONS))


def wire_cache(module: nn.Module, prefix: str, args: QuantArgs) -> dict[str, QuantizedCache]:
    """Hangs a rounding, switched off, in front of every attention layer of `module`, whose full name is `prefix`."""
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    wired = {}
    for name in attentions(names):
        attention = module.get_submodule(name)
        full = f"{prefix}.{name}" if prefix else name
        wired[full] = QuantizedCache(attention, args)
        attention.register_forward_pre_hook(wired[full], with_kwargs=True)
    return wired
