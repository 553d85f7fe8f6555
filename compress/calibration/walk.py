"""The block walk: a model of any depth is compressed with one block in memory.

Two chains of held-out activations go through the blocks together: the *base* chain through each original
block, the *compressed* chain through what has been made of it. The calibration tokens go through the
compressed blocks, so that every layer is solved for the inputs that it will really see. From the two held-out
chains fall out the error of each block, exact KL divergence and perplexity of both models at the end, and the
reference against which the artifact is verified.

`walk` is a generator: it yields a block, the caller's plain `for` loop sets the block's coded weights, and the
walk goes on. A step asks the block for its `sublayers()`: groups of weights that read the same input, with the
Gram matrix of that input, in the order of execution. When the activations of all calibration tokens fit in
memory, the block's forward pass is *suspended* in front of each group (a greenlet for each batch) and resumed
once the group is solved: one pass gathers every statistic from inputs that already went through the quantized
sublayers before ("true sequential"), and leaves the block's output behind. Where they do not fit, one pass through
the original block gathers all statistics and a second through the finished block makes its output; which of
the two is decided in the plan, not here.

Smoothing scales channels of a group's input while the group is at hand: the weights that read it are multiplied, what
makes it is divided, and so are the statistics and the inputs that wait. What makes it may be coded already: then its
scales are divided, and its codes stay.

Layers whose scheme quantizes their inputs do so from the moment their weight is set, so the compressed chain computes
as the format says; static scales come from the largest magnitude among the calibration inputs, gathered in the same
pass.

This file and `activations` are the only ones with hooks. Left out: a base chain for the calibration tokens (no method
asks for it yet) and padded batches (windows are cut from running text and are always full).
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor, nn

from compress.activations import QuantizedCache, QuantizedInput, wire_cache, wire_inputs
from compress.calibration.chain import Chain
from compress.calibration.state import TRACE, State
from compress.calibration.stats import InputStatistics
from compress.files import sync
from compress.models.family import Pair
from compress.models.frame import output_of
from compress.models.load import StreamedModel
from compress.models.surgery import Channels, channels, fold_bias, fold_source, fold_targets
from compress.numerics import QuantizedWeight, bf16_products, divided, static_scale
from compress.schemes import CACHE_SCALES, QuantArgs, Scheme
from compress.shards import save_tensors

BATCH_TOKENS = 2048  # tokens that go through a block at a time

Encode = Callable[[str, QuantizedWeight, Scheme], dict[str, Tensor]]
Decode = Callable[[str, Mapping[str, Tensor], Scheme], Tensor]
Progress = Callable[[int, int], None]
Smooth = Callable[["Block", list[str], InputStatistics], None]


@dataclass(frozen=True)
class WalkSpec:
    """What the walk is to do.

    Attributes:
        schemes: the weights to be coded, by their module's full name.
        encode: (name, coded weight, scheme) to the tensors of the checkpoint.
        decode: the float32 weight [O, I] that a loader makes of those tensors.
        sequential: suspend the forward pass at each sublayer, or gather in a pass of its own.
        dtype: in which the calibration tokens are computed; the held-out ones always in float32.
        gram: gather Gram matrices; without, only what static scales need.
        kv_cache: how keys and values are coded in the cache, None when they are not.
    """

    schemes: Mapping[str, Scheme]
    encode: Encode
    decode: Decode
    sequential: bool
    dtype: torch.dtype
    gram: bool = True
    kv_cache: QuantArgs | None = None


@dataclass
class Block:
    """One decoder block in the hands of a step.

    Attributes:
        name: full name, such as "model.layers.7".
        module: the block with float32 weights; coded weights replace the originals as they are set.
        twin: the block that the calibration tokens go through, in the walk's dtype.
        schemes: the schemes of its weights, by full name.
        pairs: of the family: places whose channels can be scaled.
        config: transformers' config of the model.
        smoothers: called for each group of weights before it is handed out.
        tensors: checkpoint tensors of the weights that have been set.
        coded: the coded weights that have been set.
        scaled: what smoothing has changed of the block's other parameters, by their full names, float32.
        inputs: the roundings of quantized inputs, in the module and the twin; off until a weight is set.
        caches: the roundings of keys and values, in the module and the twin; off until all weights are set.
        largest: the largest magnitude of calibration inputs, by the layers' names.
        record: losses and notes for the report.
    """

    name: str
    module: nn.Module
    twin: nn.Module
    schemes: dict[str, Scheme]
    spec: WalkSpec
    groups: list[list[str]]
    batches: list["_Batch"]
    calibration: Chain | None
    pairs: tuple[Pair, ...] = ()
    config: Any = None
    smoothers: tuple[Smooth, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    coded: dict[str, QuantizedWeight] = field(default_factory=dict)
    scaled: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[dict[str, QuantizedInput]] = field(default_factory=list)
    caches: list[dict[str, QuantizedCache]] = field(default_factory=list)
    largest: dict[str, Tensor] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=lambda: {"loss": {}, "notes": {}})
    outputs_written: bool = False
    _divisors: dict[str, Tensor] = field(default_factory=dict)  # by what a weight's input was divided

    def linear(self, name: str) -> nn.Linear:
        """The layer of a full name."""
        return self._linear(self.module, name)

    def _linear(self, module: nn.Module, name: str) -> nn.Linear:
        found = module.get_submodule(name[len(self.name) + 1 :])
        assert isinstance(found, nn.Linear)
        return found

    def weight(self, name: str) -> Tensor:
        """The layer's float32 weight [O, I]."""
        return self.linear(name).weight.detach()

    def set(self, names: list[str], coded: QuantizedWeight) -> None:
        """Replaces the weights of `names`, which were solved stacked along their rows in this order."""
        start = 0
        for name in names:
            end = start + self.linear(name).out_features
            part = dataclasses.replace(coded.rows(start, end), input_scale=self._input_scale(name))
            self._put(name, part)
            for wired in self.inputs:
                if name in wired:
                    wired[name].switch_on(part.input_scale)
            start = end
        self.record["loss"]["+".join(names)] = coded.loss
        if coded.notes:
            self.record["notes"]["+".join(names)] = list(coded.notes)

    def _put(self, name: str, coded: QuantizedWeight) -> None:
        """Replaces a weight by what a loader will make of its code."""
        stored = self.spec.encode(name, coded, self.schemes[name])
        weight_OI = self.spec.decode(name, stored, self.schemes[name])
        self.linear(name).weight.data = weight_OI
        self._linear(self.twin, name).weight.data = weight_OI.to(self.spec.dtype)
        self.tensors.update(stored)
        self.coded[name] = coded

    def pair_into(self, names: list[str]) -> Pair | None:
        """The pair whose channels these weights read first; None where that cannot be scaled.

        Its other targets, if any, read the same input later (one norm before attention and MLP).
        """
        start = len(self.name) + 1
        local = {name[start:] for name in names}
        schemes = {name[start:]: scheme for name, scheme in self.schemes.items()}
        first = (p for p in self.pairs if p.targets[0] in local and local <= set(p.targets))
        return next((pair for pair in first if pair.obstacle(schemes) is None), None)

    def targets(self, pair: Pair) -> list[str]:
        """Full names of the weights that read a pair's channels."""
        return [f"{self.name}.{target}" for target in pair.targets]

    def channels(self, pair: Pair) -> Channels:
        """The pair's channels, and which input columns of the targets read each."""
        return channels(self.module, pair, self.config)

    def scale_channels(self, pair: Pair, scale_C: Tensor, statistics: InputStatistics) -> None:
        """Divides what a pair's source makes by `scale_C` and multiplies what its targets read of it.

        A norm's weight is rounded to bfloat16 as it is stored, and the targets are multiplied by what that left, so
        nothing but the rounding of the targets changes. A source that is coded keeps its codes; its scales are divided.
        """
        found = self.channels(pair)
        source = f"{self.name}.{pair.source}"
        if source in self.coded:
            scale_C = scale_C.float()
            self._put(source, divided(self.coded[source], found.rows_C, scale_C))
            fold_bias(self.module, pair, scale_C, self.config)
        else:
            scale_C = fold_source(self.module, pair, scale_C, self.config)
        for part in ("weight", "bias"):
            parameter = getattr(self.module.get_submodule(pair.source), part, None)
            if parameter is None or (part == "weight" and source in self.schemes):
                continue
            parameter.data = parameter.data.bfloat16().float()  # as it will be stored
            self.scaled[f"{source}.{part}"] = parameter.data
            getattr(self.twin.get_submodule(pair.source), part).data = parameter.data.to(self.spec.dtype)
        fold_targets(self.module, pair, scale_C, self.config)
        for target in pair.targets:
            weight_OI = self.module.get_submodule(target).weight
            self.twin.get_submodule(target).weight.data = weight_OI.data.to(self.spec.dtype)
        scale_I = found.expand(scale_C)
        statistics.rescale(scale_I)
        for name in self.targets(pair):
            self._divisors[name] = self._divisors[name] * scale_I if name in self._divisors else scale_I

    def _input_scale(self, name: str) -> Tensor | None:
        """float32 [1] for a layer whose inputs have a static scale.

        Raises:
            ValueError: the inputs are not finite.
        """
        args = self.schemes[name].input_activations
        if args is None or args.dynamic:
            return None
        largest = self.largest.get(name, torch.zeros(()))
        if not bool(largest.isfinite()):
            raise ValueError(f"the inputs of {name} hold values that are not finite")
        if not bool(largest):
            self.record["notes"][name] = ["input_scale: only zeros were seen, so 1 stands for the largest"]
            largest = torch.ones(())
        return static_scale(largest, args)

    def in_order(self) -> Iterator[list[str]]:
        """Weights that read the same input, in the order of execution; every weight is in one group.

        The weights of a group must be set before the next group is asked for.
        """
        seen: list[str] = []
        for names in self.groups if self.calibration is None else (names for names, _ in self._visited()):
            seen += names
            yield names
        yield from ([name] for name in self.schemes if name not in seen)

    def sublayers(self) -> Iterator[tuple[list[str], Tensor]]:
        """As `in_order`, each group with its input's Gram matrix [I, I]."""
        for names, found in self._visited():
            assert found.gram is not None, "the method declared no Gram matrix"
            yield names, found.gram.matrix()

    def _visited(self) -> Iterator[tuple[list[str], InputStatistics]]:
        assert self.calibration is not None, "the method declared no statistics"
        for names, found in self._suspended() if self.spec.sequential else self._gathered():
            for smooth in self.smoothers:
                smooth(self, names, found)
            self.largest.update(dict.fromkeys(names, found.largest_I.max()))
            yield names, found

    def _statistics(self, names: list[str]) -> InputStatistics:
        return InputStatistics(self.linear(names[0]).in_features, self.spec.gram)

    def _read(self, batch: "_Batch") -> Tensor:
        assert self.calibration is not None
        return self.calibration.read(batch.start, batch.end).to(self.spec.dtype)

    def quantize_cache(self) -> None:
        """Fixes the scales of keys and values by what the calibration pass saw, and switches their rounding on.

        Raises:
            ValueError: they are not finite.
        """
        for name, watched in (self.caches[-1] if self.caches else {}).items():
            if not all(bool(largest.isfinite()) for largest in watched.largest):
                raise ValueError(f"the keys or values of {name} hold values that are not finite")
            keys, values = (static_scale(largest, watched.args) for largest in watched.largest)
            for part, scale in zip(CACHE_SCALES, (keys, values), strict=True):
                self.tensors[f"{name}.{part}"] = scale.to(torch.bfloat16)
            for wired in self.caches:
                wired[name].switch_on((keys, values))

    def rerun(self) -> None:
        """Makes the calibration chain's output by a pass through the finished block, unless it is there."""
        if self.calibration is None or self.outputs_written:
            return
        for batch in self.batches:
            with bf16_products():
                self.calibration.write(batch.start, _forward(self.twin, self._read(batch), batch.kwargs))

    def _suspended(self) -> Iterator[tuple[list[str], InputStatistics]]:
        def forward(batch: _Batch) -> Tensor:
            return output_of(self.twin(self._read(batch), **batch.kwargs))

        def suspend(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            parent = greenlet.getcurrent().parent
            assert parent is not None
            parked = inputs[0].to(torch.bfloat16, copy=True)  # what waits is kept as blocks' outputs are
            divided = name in self._divisors  # with the first that read this input
            parent.switch(inputs[0])
            _restore(inputs[0], parked, None if divided else self._divisors.get(name))

        hooks = [  # before any rounding
            self._linear(self.twin, names[0]).register_forward_pre_hook(partial(suspend, names[0]), prepend=True)
            for names in self.groups
        ]
        runs = [(batch, greenlet(forward)) for batch in self.batches]
        try:
            for names in self.groups:
                found = self._statistics(names)
                for batch, run in runs:
                    waiting = _advance(run, batch)
                    found.update(waiting)
                    _empty(waiting)
                yield names, found
            assert self.calibration is not None
            for batch, run in runs:
                self.calibration.write(batch.start, _advance(run, batch))
            self.outputs_written = not self.caches  # they were not quantized yet
        finally:
            for hook in hooks:
                hook.remove()

    def _gathered(self) -> Iterator[tuple[list[str], InputStatistics]]:
        statistics = [self._statistics(names) for names in self.groups]
        hooks = [
            self._linear(self.twin, names[0]).register_forward_pre_hook(
                lambda _, inputs, found=found: found.update(inputs[0])
            )
            for names, found in zip(self.groups, statistics, strict=True)
        ]
        assert self.calibration is not None
        try:
            for batch in self.batches:
                _forward(self.twin, self._read(batch), batch.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        for names, found in zip(self.groups, statistics, strict=True):
            if names[0] in self._divisors:  # with the first that read this input
                found.rescale(self._divisors[names[0]])
            yield names, found


@dataclass(frozen=True)
class _Batch:
    """Rows [start, end) of a chain, and the keyword arguments of the block at hand."""

    start: int
    end: int
    kwargs: dict[str, Any]


def _advance(run: greenlet, batch: "_Batch") -> Tensor:
    """Runs a suspended forward pass up to its next sublayer, or its end, and returns what it hands over."""
    with torch.no_grad(), bf16_products():
        handed: Tensor = run.switch(batch) if not run else run.switch()
    return handed


def _empty(tensor: Tensor) -> None:
    """Frees a tensor's memory while others still refer to it."""
    tensor.untyped_storage().resize_(0)


def _restore(tensor: Tensor, values: Tensor, divisor_I: Tensor | None) -> None:
    """Gives an emptied tensor its memory and values back, divided channel by channel where they were scaled."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    tensor.copy_(values)
    if divisor_I is not None:
        tensor.div_(divisor_I)


@torch.no_grad()
def _forward(module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return output_of(module(hidden, **kwargs))


def walk(
    model: StreamedModel, windows: tuple[Tensor, Tensor], spec: WalkSpec, state: State, progress: Progress
) -> Iterator[Block]:
    """Goes through the blocks from where `state` is; yields each, and commits it when the caller comes back.

    Args:
        model: the original.
        windows: calibration and held-out tokens, int64 [N, T] and [H, T].
        spec: what is to be done.
        state: from `open_state`; holds the chains' end and a record per block afterwards.
        progress: called with blocks done and blocks in all.
    """
    tokens_NT, heldout_HT = windows
    calls = {
        "heldout": _begin(model, heldout_HT, [state.base, state.compressed], state.started, torch.float32),
        "calibration": _begin(model, tokens_NT, [state.calibration], state.started, spec.dtype)
        if state.calibration
        else [],
    }
    if not state.started:
        for chain in state.chains():
            chain.sync()
        state.commit()
    progress(len(state.blocks), model.block_count)
    for index in range(len(state.blocks), model.block_count):
        batches = {k: [_Batch(s, e, c[index]) for s, e, c in v] for k, v in calls.items()}
        name = model.block_name(index)
        schemes = {n: s for n, s in spec.schemes.items() if n.startswith(name + ".")}
        module = model.block(index)
        groups = _base_pass(module, name, schemes, state.base, batches["heldout"])
        twin = module if spec.dtype == torch.float32 else copy.deepcopy(module).to(spec.dtype)
        block = Block(
            name, module, twin, schemes, spec, groups, batches["calibration"], state.calibration,
            pairs=model.family.pairs_of(model.skeleton.config), config=model.skeleton.config,
        )  # fmt: skip
        block.inputs = [wire_inputs(part, name, schemes) for part in dict.fromkeys((module, twin))]
        if spec.kv_cache is not None:
            block.caches = [wire_cache(part, name, spec.kv_cache) for part in dict.fromkeys((module, twin))]
        yield block
        missing = [n for n in schemes if not any(t.startswith(n + ".") for t in block.tensors)]
        assert not missing, f"the step left {missing} unset"
        _finish(block, index, model, state, batches["heldout"])
        progress(index + 1, model.block_count)


def _begin(
    model: StreamedModel, tokens_NT: Tensor, chains: list[Chain | None], started: bool, dtype: torch.dtype
) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """Fills the chains with embeddings (unless resumed); the batches' rows and keyword arguments."""
    count, length = tokens_NT.shape
    size = max(1, BATCH_TOKENS // length)
    sizes = sorted({min(size, count), count % size} - {0})
    if started:  # the arguments depend on a batch's shape alone
        calls = {n: cast_calls(next(model.embed([tokens_NT[:n]]))[1], dtype) for n in sizes}
        return [(s, min(s + size, count), calls[min(size, count - s)]) for s in range(0, count, size)]
    batches = []
    kept: dict[int, list[dict[str, Any]]] = {}
    for i, (hidden, call) in enumerate(model.embed(torch.split(tokens_NT, size))):
        for chain in chains:
            if chain is not None:
                chain.fill(i * size, hidden)
        batches.append((i * size, i * size + len(hidden), kept.setdefault(len(hidden), cast_calls(call, dtype))))
    return batches


def cast_calls(calls: list[dict[str, Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Keyword arguments with floating-point tensors in another dtype; what blocks share stays shared."""
    done: dict[int, Any] = {}

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return done.setdefault(id(value), value.to(dtype))
        if isinstance(value, tuple):
            return tuple(cast(v) for v in value)
        return value

    return [{k: cast(v) for k, v in call.items()} for call in calls]


def _base_pass(
    module: nn.Module, name: str, schemes: Mapping[str, Scheme], base: Chain, batches: list[_Batch]
) -> list[list[str]]:
    """Runs the base chain through the original block; which of its weights read the same input."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        module.get_submodule(n[len(name) + 1 :]).register_forward_pre_hook(
            lambda _, inputs, n=n: seen.append((n, inputs[0]))
        )
        for n in schemes
    ]
    groups: list[list[str]] = []
    for i, batch in enumerate(batches):
        base.write(batch.start, _forward(module, base.read(batch.start, batch.end), batch.kwargs))
        if i == 0:
            for hook in hooks:
                hook.remove()
            last: Tensor | None = None
            for n, x in seen:
                if x is last:
                    groups[-1].append(n)
                else:
                    groups.append([n])
                last = x
            seen.clear()
    return groups


def _finish(block: Block, index: int, model: StreamedModel, state: State, heldout: list[_Batch]) -> None:
    """Runs the compressed chain through the finished block, writes the block, commits."""
    block.quantize_cache()
    block.rerun()
    error = total = 0.0
    last = []
    for batch in heldout:
        output = _forward(block.module, state.compressed.read(batch.start, batch.end), batch.kwargs)
        state.compressed.write(batch.start, output)
        reference = state.base.other(batch.start, batch.end)
        error += float((output - reference).square().sum())
        total += float(reference.square().sum())
        last.append(output[:, -1])
    coded = {f"{n}.weight" for n in block.schemes}
    untouched = {k: v for k, v in model.reader(block.name).items() if k not in coded}
    path = state.block_file(index)
    scaled = {k: v.to(untouched[k].dtype) for k, v in block.scaled.items()}
    kept = model.stored({**untouched, **block.tensors, **scaled})
    save_tensors({**kept, TRACE: torch.cat(last)}, path.with_suffix(".tmp"))
    sync(path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
    for chain in state.chains():
        chain.sync()
        chain.flip()
    state.blocks.append({"name": block.name, "error": (error / max(total, 1e-30)) ** 0.5, **block.record})
    state.commit()
