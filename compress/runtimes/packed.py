"""The fast runtime: the model's own transformers class, whose coded weights stay coded.

The idea: nothing of the model is imitated. Its skeleton is filled block by block with the checkpoint's tensors, and
each coded linear layer is replaced by one that multiplies by a kernel of `kernels.TABLE`. Layers that read the same
input (q/k/v; gate/up) are packed as one weight: the first that is called computes all of them. A model that is not
coded runs the same way, in bfloat16, so that a comparison compares weights and nothing else.

While loading, no more is in memory than what is kept and the block that is being packed.

In small models the head is much of what is read; `head="int8"` rounds it to 8 bits by row, which changes the model
a little, and so is only done when it is asked for.

Left out: other dtypes than bfloat16, in which everything is expanded; training; other devices than CPUs.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.activations import wire_inputs
from compress.artifact import CodedModel, open_artifact, switch_cache_on
from compress.errors import CompressError
from compress.evaluation.memory import large_blocks_returned
from compress.formats.base import INPUT_SCALE
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.load import StreamedModel, linears
from compress.numerics import QuantizedWeight, qparams, quantize
from compress.runtimes.crossover import crossover
from compress.runtimes.hf import HfRuntime, Opened, require_folder
from compress.runtimes.kernels import EXPANDED, how_held, line, pack
from compress.schemes import CACHE_SCALES, PRESETS, Scheme

_TWICE = "codes of 4 bits are in memory twice, in the order of each kernel: for few rows, and to expand them for many"


class PackedLinear(nn.Module):
    """A linear layer by two kernels, one for few rows and one for many.

    Attributes:
        kernels: their names.
        crossover: the most rows for which the first is used.
        second_bytes: of what only the kernel for many rows reads.
    """

    bias: Tensor | None
    order_I: Tensor | None

    def __init__(self, weight: QuantizedWeight, scheme: Scheme, bias: Tensor | None, where: str) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.q_OI.shape
        order_I = None
        if weight.g_idx_I is not None:  # columns in the order of their groups
            order_I = torch.argsort(weight.g_idx_I, stable=True)
            weight = replace(weight, q_OI=weight.q_OI[:, order_I], g_idx_I=None)
        held, _ = how_held(scheme, (self.out_features, self.in_features))
        chosen = line("cpu", held)
        self.kernels = (chosen.few, chosen.many)
        self.crossover = 1
        packed = [pack(kernel, weight, scheme, where) for kernel in dict.fromkeys(self.kernels)]
        self._few, self._many = packed[0].product, packed[-1].product
        for i, tensor in enumerate(itertools.chain(*(part.tensors for part in packed))):
            self.register_buffer(f"packed_{i}", tensor, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("order_I", order_I, persistent=False)
        first = {id(tensor) for tensor in packed[0].tensors}
        self.second_bytes = sum(t.nbytes for part in packed[1:] for t in part.tensors if id(t) not in first)
        if len(packed) == 2:
            groups = weight.scale.shape[1]
            what = (held, self.out_features, self.in_features, self.in_features // groups)
            self.crossover = crossover(self._few, self._many, what)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] to x wᵀ + bias [..., O]."""
        x_NI = x.reshape(-1, self.in_features)
        if self.order_I is not None:
            x_NI = x_NI.index_select(1, self.order_I)
        y_NO = self._few(x_NI) if len(x_NI) <= self.crossover else self._many(x_NI)
        if self.bias is not None:
            y_NO = y_NO + self.bias
        return y_NO.view(*x.shape[:-1], self.out_features)


class Together(nn.Module):
    """Some of the outputs of a layer that computes those of several: asked by the first, kept for the others."""

    _whole: nn.Module  # not a child but of the first, whose `whole` it is: counted once
    _sizes: list[int]
    _index: int
    _shared: dict[str, Any]

    def __init__(self, whole: nn.Module, sizes: Sequence[int], index: int, shared: dict[str, Any]) -> None:
        super().__init__()
        if index == 0:
            self.whole = whole
        self.__dict__.update(_whole=whole, _sizes=list(sizes), _index=index, _shared=shared)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] to this layer's outputs [..., O]."""
        shared = self._shared
        if self._index == 0 or shared.get("input") is not x:
            shared.update(input=x, outputs=self._whole(x).split(self._sizes, -1))
        outputs: Tensor = shared["outputs"][self._index]
        if self._index == len(self._sizes) - 1:
            shared.clear()
        return outputs


def open_packed(path: Path, dtype: torch.dtype, expand: bool, head: Literal["int8"] | None = None) -> Opened:
    """The model of a checkpoint folder, its coded weights packed where a kernel reads them.

    Args:
        dtype: of everything else; in another one than bfloat16 all weights are expanded.
        expand: expand all weights.
        head: "int8" holds the head in 8 bits beside the embedding; None leaves it as it is.

    Raises:
        CompressError: the folder is no checkpoint that we read, its weights do not fill the model, or a kernel does
            not compute what it should.
    """
    coded = open_artifact(path)
    packs = dtype == torch.bfloat16 and not expand
    ways = _ways(coded, packs=packs)
    with large_blocks_returned():
        _fill(coded, coded.fit(open_checkpoint(path)), dtype, packs=packs)
    model: Any = coded.skeleton
    if model.config.tie_word_embeddings and model.get_output_embeddings().weight.is_meta:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    absent = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if absent:
        raise CompressError(
            f"{len(absent)} weights of the model are not in the checkpoint, first {absent[0]}",
            where=str(path), hint="make or download the checkpoint again",
        )  # fmt: skip
    if isinstance(coded, CodedModel):
        _round_activations(coded)
    if head is not None and packs:
        _round_head(model, coded.family.head)
        ways["int8 packed head"] = 1
    model.config.dtype = dtype
    words = [*(f"{way} ({count} layers)" for way, count in ways.items()), str(dtype).removeprefix("torch.")]
    notes = (_TWICE,) if any(way.startswith("int4") for way in ways) else ()
    return Opened(model.eval(), ", ".join(words), _kernels(model), notes)


def _fill(coded: StreamedModel, checkpoint: Checkpoint, dtype: torch.dtype, *, packs: bool) -> None:
    """Puts the checkpoint's tensors into the skeleton, block by block."""
    schemes = coded.schemes if isinstance(coded, CodedModel) else {}
    blocks = [coded.block_name(i) for i in range(coded.block_count)]
    inside = tuple(f"{block}." for block in blocks)
    others = (name.rpartition(".")[0] for name in checkpoint.files if not name.startswith(inside))
    for part in (*blocks, *dict.fromkeys(others)):
        left = dict.fromkeys(checkpoint.below(part))
        for group in _groups(coded, part, [name for name in schemes if name == part or name.startswith(f"{part}.")]):
            names = [tensor for name in group for tensor in checkpoint.below(name)]
            _place(coded, group, checkpoint.read(names), dtype, packs=packs)
            left = dict.fromkeys(name for name in left if name not in names)
        rest = [name for name in left if not name.endswith((*coded.ignored, *CACHE_SCALES))]
        tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.read(rest).items()}
        coded.skeleton.load_state_dict(tensors, strict=False, assign=True)


def _groups(coded: StreamedModel, part: str, names: list[str]) -> list[list[str]]:
    """The linear layers of a part that are placed together: those that read the same input; then what else is coded."""
    linear = {name for name, module in coded.skeleton.named_modules() if isinstance(module, nn.Linear)}
    fused = [[f"{part}.{name}" for name in group] for group in coded.family.fused]
    fused = [group for group in fused if linear.issuperset(group)]
    return fused + [[name] for name in names if not any(name in group for group in fused)]


def _place(
    coded: StreamedModel, group: list[str], stored: dict[str, Tensor], dtype: torch.dtype, *, packs: bool
) -> None:
    """Puts some linear layers into the skeleton, as one where that is the same."""
    schemes = coded.schemes if isinstance(coded, CodedModel) else {}
    biases = [stored.pop(f"{name}.bias", None) for name in group]
    weights = [_weight(coded, name, stored, dtype, packs=packs) for name in group]
    together = _same([schemes.get(name) for name in group], weights) and len({b is None for b in biases}) == 1
    for run in [slice(0, len(group))] if together else [slice(i, i + 1) for i in range(len(group))]:
        names, sizes = group[run], [_rows(weight) for weight in weights[run]]
        bias = None if biases[run][0] is None else torch.cat([b.to(dtype) for b in biases[run] if b is not None])
        made = _linear(weights[run], bias, schemes.get(names[0]), names[0])
        shared: dict[str, Any] = {}
        for i, name in enumerate(names):
            coded.skeleton.set_submodule(name, made if len(names) == 1 else Together(made, sizes, i, shared))


def _weight(
    coded: StreamedModel, name: str, stored: dict[str, Tensor], dtype: torch.dtype, *, packs: bool
) -> Tensor | QuantizedWeight:
    """A layer's weight, taken out of `stored`: its codes where a kernel reads them, else its values in `dtype`."""
    if not isinstance(coded, CodedModel) or name not in coded.schemes:
        return stored.pop(f"{name}.weight").to(dtype)
    scheme, fmt = coded.schemes[name], coded.format
    layer: Any = coded.skeleton.get_submodule(name)
    read: Tensor | QuantizedWeight | None = None
    if packs and how_held(scheme, (layer.out_features, layer.in_features))[0] != EXPANDED:
        read = fmt.read(name, stored, scheme)
    if read is None:
        read = fmt.decode(name, stored, scheme).to(dtype)
    for tensor in fmt.parts:
        stored.pop(f"{name}.{tensor}", None)
    return read


def _rows(weight: Tensor | QuantizedWeight) -> int:
    return len(weight if isinstance(weight, Tensor) else weight.q_OI)


def _same(schemes: list[Scheme | None], weights: Sequence[Tensor | QuantizedWeight]) -> bool:
    """Whether layers can be computed as one: in values without rounded inputs, or in codes of one kind and order."""
    codes = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not codes:
        return not any(scheme is not None and scheme.input_activations for scheme in schemes)
    if len(codes) < len(weights) or len(set(schemes)) > 1:
        return False
    return all(_equal(c.g_idx_I, codes[0].g_idx_I) and _equal(c.input_scale, codes[0].input_scale) for c in codes)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _linear(
    weights: Sequence[Tensor | QuantizedWeight], bias: Tensor | None, scheme: Scheme | None, where: str
) -> nn.Module:
    """One linear layer with the outputs of all."""
    codes = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if codes:
        assert scheme is not None
        return PackedLinear(_stacked(codes), scheme, bias, where)
    weight_OI = torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    made = nn.Linear(weight_OI.shape[1], len(weight_OI), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight_OI)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def _stacked(codes: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Coded weights of one kind, one below the other."""
    if len(codes) == 1:
        return codes[0]
    scale_OG = torch.cat([code.scale.expand(len(code.q_OI), -1) for code in codes])
    zeros = [code.zero for code in codes if code.zero is not None]
    return replace(codes[0], q_OI=torch.cat([code.q_OI for code in codes]), scale=scale_OG,
                   zero=torch.cat(zeros) if zeros else None, global_scale=None)  # fmt: skip


def _round_activations(coded: CodedModel) -> None:
    """Hangs the rounding of inputs and caches that no kernel does into the model, as the checkpoint says."""
    left = {n: s for n, s in coded.schemes.items() if isinstance(coded.skeleton.get_submodule(n), nn.Linear)}
    for name, rounding in wire_inputs(coded.skeleton, "", left).items():
        part = f"{name}.{INPUT_SCALE}"
        rounding.switch_on(None if rounding.args.dynamic else coded.checkpoint.read([part])[part].float())
    if coded.kv_cache is not None:
        switch_cache_on(coded.skeleton, "", coded.kv_cache, coded.checkpoint)


def _round_head(model: Any, name: str) -> None:
    """Puts the head's weight, rounded to 8 bits by row, in its place; one that is coded already stays."""
    head = model.get_submodule(name)
    if isinstance(head, PackedLinear):
        return
    scheme = PRESETS["W8A16"]
    w_OI = head.weight.detach().float()
    scale_O1, _ = qparams(w_OI.amin(1, keepdim=True), w_OI.amax(1, keepdim=True), scheme.weights)
    q_OI = quantize(w_OI, scale_O1, 0.0, scheme.weights).to(torch.int8)
    bias = None if head.bias is None else head.bias.detach()
    model.set_submodule(name, PackedLinear(QuantizedWeight(q_OI, scale_O1, None), scheme, bias, name))


def _ways(coded: StreamedModel, *, packs: bool) -> dict[str, int]:
    """How the coded layers are held, for people, and how many are."""
    if not isinstance(coded, CodedModel):
        return {}
    ways: Counter[str] = Counter()
    for name, shape, _ in linears(coded.skeleton):
        if name in coded.schemes:
            scheme = coded.schemes[name]
            held, why = how_held(scheme, shape) if packs else (EXPANDED, scheme.text)
            ways[f"{why} expanded" if held == EXPANDED else f"{held} packed"] += 1
    return dict(ways)


def _kernels(model: nn.Module) -> dict[str, int]:
    """How many layers each kernel runs, at one row."""
    return dict(Counter(m.kernels[0] for m in model.modules() if isinstance(m, PackedLinear)))


class PackedRuntime(HfRuntime):
    """`Runtime` by kernels that read codes; see the module."""

    def __init__(self, head: Literal["int8"] | None = None) -> None:
        super().__init__(partial(open_packed, head=head))


def packed_head8() -> PackedRuntime:
    """The runtime with a head of 8 bits."""
    return PackedRuntime(head="int8")


def load(path: str | Path, *, head: Literal["int8"] | None = None) -> Any:
    """An artifact, or any checkpoint folder that we read, as a transformers model in bfloat16 whose weights stay coded.

    It is of the model's own class, with its `forward` and `generate`; for inference.

    Args:
        path: the folder.
        head: "int8" rounds the head to 8 bits by row: faster, most of all in small models, and not quite the same.

    Raises:
        CompressError: no such folder, a checkpoint that we do not read, or a kernel that does not compute what it
            should on this machine.
    """
    folder = Path(path).expanduser()
    require_folder(folder)
    return open_packed(folder, torch.bfloat16, expand=False, head=head).model
