"""A decoder of an unknown family, by structure alone: enough for methods that need no roles.

Embedding and head are what transformers' own accessors give, the blocks are the one list as long as the config
says, the final norm is what reads the last block's output. That is a guess until it is tried, and it is tried on
the skeleton, before any weights are read: one block of each kind runs on the meta device, and the model's own
forward runs twice around stubs of its blocks, on random embeddings. The family is refused unless every block reads
exactly what the one before returned, nothing that a block is given depends on the tokens, every linear layer is used
once, and the final norm only at the end.

Left out: experts, recurrences, and whatever else keeps blocks from being a plain chain of linear layers.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.family import ModelFamily
from compress.models.frame import Call, Head, inner_name, output_of, run_frame
from compress.models.kinds import unsupported

_ROWS, _SHAPE = 8, (2, 5)  # embedding rows and tokens of a trial


def infer(skeleton: nn.Module, model_type: str, where: str) -> ModelFamily:
    """The family of a skeleton by its structure.

    Raises:
        CompressError: it cannot be told; says why, and names the known families.
    """
    faults = (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
    try:
        family = _named(skeleton, model_type)
        return _tried(skeleton, family)
    except _Unclear as error:
        raise unsupported(model_type, str(error), where) from error
    except faults as error:  # of the model's own code
        said = " ".join(str(error).split())[:120]
        raise unsupported(model_type, f"a trial run of it failed: {said}", where) from error


class _Unclear(Exception):
    """Why a structure cannot be told."""


def _named(skeleton: Any, model_type: str) -> ModelFamily:
    """The family's names but for its norm."""
    names = {id(module): name for name, module in skeleton.named_modules()}
    embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise _Unclear("it has no token embedding")
    if not isinstance(head, nn.Linear) or "." in names[id(head)]:
        raise _Unclear("its head is no linear layer")
    count = skeleton.config.num_hidden_layers
    lists = [n for n, m in skeleton.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    lists = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    if len(lists) != 1 or "." not in lists[0]:
        raise _Unclear(f"{len(lists)} lists of {count} blocks were found, not one")
    family = ModelFamily(
        model_type=model_type, embedding=names[id(embedding)], blocks=lists[0], norm="", head=names[id(head)],
        fused=(), pairs=(), inferred=True,
    )  # fmt: skip
    inner = skeleton.get_submodule(inner_name(family))
    if family.embedding.rpartition(".")[0] != inner_name(family) or inner._parameters:
        raise _Unclear("its embedding does not lie beside its blocks, or single weights do")
    for name, parameter in skeleton.get_submodule(family.blocks).named_parameters():
        if parameter.dim() > 2:
            raise _Unclear(f"{family.blocks}.{name} belongs to no linear layer (experts, or a convolution)")
    return family


def _tried(skeleton: nn.Module, family: ModelFamily) -> ModelFamily:
    """The family with its norm, after trials on the skeleton."""
    rows_BT = torch.arange(_SHAPE[0] * _SHAPE[1]).view(_SHAPE) % _ROWS
    blocks: Any = skeleton.get_submodule(family.blocks)
    reached = _reach_first_block(skeleton, family, rows_BT)
    tuples = _returns_tuple(blocks[0], reached.hidden_BTD, reached.call)
    first, second = (_follow(skeleton, family, rows, tuples) for rows in (rows_BT, rows_BT.flip(1)))
    if first.broken or len(first.calls) != skeleton.config.num_hidden_layers:  # type: ignore[union-attr]
        raise _Unclear("its blocks are no plain chain, in which each reads what the one before returned")
    if first.norm is None or not first.ends:
        raise _Unclear("no norm was found that reads the last block's output and ends the decoder")
    if not all(_same(*calls) for calls in zip(first.calls, second.calls, strict=True)):
        raise _Unclear("what its blocks are given depends on the tokens")
    kinds = {repr(block): index for index, block in enumerate(blocks)}
    if any(_returns_tuple(blocks[i], reached.hidden_BTD, first.calls[i]) != tuples for i in kinds.values()):
        raise _Unclear("some of its blocks return a tuple and some do not")
    found = replace(family, norm=f"{inner_name(family)}.{first.norm}", tuples=tuples)
    projection = nn.Linear(reached.hidden_BTD.shape[-1], _ROWS)
    Head(skeleton, found, nn.Identity(), projection)(reached.hidden_BTD)
    return found


@dataclass
class _Trail:
    """What was seen of one forward pass around stubs.

    Attributes:
        calls: the blocks' keyword arguments.
        broken: a block read something other than what the one before returned.
        early: children that were used before the blocks were through.
        norm: the child that read the last block's output.
        ends: the norm's output is the decoder's.
    """

    calls: list[Call] = field(default_factory=list)
    broken: bool = False
    early: set[str] = field(default_factory=set)
    norm: str | None = None
    ends: bool = False
    last: Tensor | None = None


def _follow(skeleton: nn.Module, family: ModelFamily, rows_BT: Tensor, tuples: bool) -> _Trail:
    trail = _Trail()
    count = skeleton.config.num_hidden_layers  # type: ignore[union-attr]

    def see(hidden_BTD: Tensor, call: Call) -> Any:
        trail.broken |= trail.last is not None and hidden_BTD is not trail.last
        trail.calls.append(call)
        trail.last = hidden_BTD + 1
        return (trail.last,) if tuples else trail.last

    def notice(name: str, given: Any) -> Tensor | None:
        if trail.last is None or given is not trail.last or len(trail.calls) != count:
            trail.early.add(name)
            return None
        trail.norm = name if trail.norm is None and name not in trail.early else None
        trail.last = trail.last + 1
        return trail.last

    parts = {name: _Watched(name, part, notice) for name, part in _parts(skeleton, family).items()}
    hidden_BTD = run_frame(skeleton, family, parts, rows_BT, see)
    trail.ends = trail.last is not None and torch.equal(hidden_BTD, trail.last)
    return trail


class _Watched(nn.Module):
    """A module that lies beside the blocks; asked about everything that it is given before it computes."""

    def __init__(self, name: str, module: nn.Module, notice: Any) -> None:
        super().__init__()
        self.__dict__.update(_name=name, _module=module, _notice=notice)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def forward(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Its answer, or what `notice` says in its place."""
        answer = self.__dict__["_notice"](self.__dict__["_name"], given)
        return self.__dict__["_module"](given, *args, **kwargs) if answer is None else answer


def _parts(skeleton: nn.Module, family: ModelFamily) -> dict[str, nn.Module]:
    """The blocks' neighbours with random weights, the embedding with a few rows."""
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name, module in skeleton.get_submodule(inner_name(family)).named_children():
        if name == family.blocks.rpartition(".")[2]:
            continue
        parts[name] = filled = copy.deepcopy(module)
        if name == family.embedding.rpartition(".")[2]:
            filled.padding_idx = None  # type: ignore[assignment]
            filled._parameters["weight"] = nn.Parameter(filled.weight[:_ROWS])  # type: ignore[index]
        for part in filled.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    part._parameters[key] = nn.Parameter(drawn, requires_grad=False)
    return parts


class _Reached(Exception):
    """The first block was called, with these."""

    def __init__(self, hidden_BTD: Tensor, call: Call) -> None:
        super().__init__()
        self.hidden_BTD, self.call = hidden_BTD, call


def _reach_first_block(skeleton: nn.Module, family: ModelFamily, rows_BT: Tensor) -> _Reached:
    """What the first block is given."""

    def reach(hidden_BTD: Tensor, call: Call) -> Any:
        raise _Reached(hidden_BTD, call)

    try:
        run_frame(skeleton, family, _parts(skeleton, family), rows_BT, reach)
    except _Reached as reached:
        return reached
    raise _Unclear("its blocks are never called")


def _returns_tuple(original: nn.Module, hidden_BTD: Tensor, call: Call) -> bool:
    """Runs a block on the meta device: whether it returns a tuple.

    Raises:
        _Unclear: it does not use each of its linear layers once, or returns something else than hidden states.
    """
    block = copy.deepcopy(original).to("meta")
    used: list[str] = []
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, _Watched(name, module, lambda n, _: used.append(n)))
    with torch.no_grad():
        returned = block(hidden_BTD.to("meta"), **_to_meta(call))
    if not used or sorted(used) != sorted(_linear_names(original)):
        raise _Unclear("a block does not use each of its linear layers once")
    if not isinstance(returned, Tensor | tuple) or output_of(returned).shape != hidden_BTD.shape:
        raise _Unclear("its blocks return something else than hidden states")
    return isinstance(returned, tuple)


def _linear_names(block: nn.Module) -> set[str]:
    return {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(_to_meta(v) for v in value)
    return {k: _to_meta(v) for k, v in value.items()} if isinstance(value, dict) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two blocks' arguments are the same, of kinds that can be compared."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, bool | int | float | str | None) and bool(one == other)
