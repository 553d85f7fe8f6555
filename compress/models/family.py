"""What the toolkit knows about a model family: the names of its parts and which of them can be scaled, as data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.schemes import Scheme

Rows = Literal["all", "second_half", "values_last", "values_by_group"]


@dataclass(frozen=True)
class Pair:
    """Channels that are made in one place of a block and read in another: what one divides, the other multiplies.

    Attributes:
        source: the module whose output is scaled: a norm or a linear layer.
        targets: the linear layers that read it, all of them; sublayers between are indifferent to a positive scale.
        plus_one: the norm multiplies by 1 + w, not by w.
        rows: which outputs of a linear source are meant. "all"; "second_half" (gate and up in one weight);
            "values_last" (queries, keys, values one after the other); "values_by_group" (each key head's queries,
            key and value together, head after head). Value heads are shared by their query heads.
        when: config keys and the values that each must have one of, for the pair to exist.
    """

    source: str
    targets: tuple[str, ...]
    plus_one: bool = False
    rows: Rows = "all"
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def from_norm(self) -> bool:
        """Whether a norm makes the channels; families name theirs so."""
        return "norm" in self.source or self.source.startswith("ln_")

    def obstacle(self, schemes: Mapping[str, Scheme]) -> str | None:
        """Why the channels cannot be scaled where a block's weights have these schemes; None when they can.

        Args:
            schemes: of the block's coded weights, by their names in the block.
        """
        dense = [target for target in self.targets if target not in schemes]
        if dense:
            return f"{dense[0]} is not quantized"
        source = schemes.get(self.source)
        if source is not None and not source.weights.divisible:
            return f"the rows of {self.source}, in {source.text}, have no scales of their own"
        return None

    def holds(self, config: Any) -> bool:
        """Whether a model of this config has the pair."""
        return all(getattr(config, key, None) in values for key, values in self.when)


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
VALUES = Pair("self_attn.v_proj", ("self_attn.o_proj",))
UP = Pair("mlp.up_proj", ("mlp.down_proj",))


def _refuses_none(config: Any) -> None:
    del config


@dataclass(frozen=True)
class ModelFamily:
    """Names of a decoder family's parts, as its transformers modules and its checkpoints spell them.

    Attributes:
        model_type: the config's `model_type`.
        embedding: token embedding.
        blocks: the list of decoder blocks; a block's weights begin with "<blocks>.<i>.".
        norm: the norm after the last block.
        head: the output projection.
        fused: sublayers that runtimes run as one matrix product (q/k/v; gate/up) and so want one scheme.
        pairs: what smoothing can scale in a block, in the order of execution.
        unpaired: linear layers whose input cannot be scaled, and why; for configs in which no pair has them.
        tuples: blocks return a tuple, their output first.
        renamed: beginnings of tensors' names in checkpoints, and of the modules' that they belong to.
        ignored: endings of tensors' names in checkpoints that hold no parameter (masks, rotary frequencies).
        refuses: why a config of the family is not supported, None when it is.
        inferred: found by the model's structure; nothing is known of its pairs.
    """

    model_type: str
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    fused: tuple[tuple[str, ...], ...] = (ATTENTION, GATED)
    pairs: tuple[Pair, ...] = (
        Pair("input_layernorm", ATTENTION),
        VALUES,
        Pair("post_attention_layernorm", GATED),
        UP,
    )
    unpaired: tuple[tuple[str, str], ...] = ()
    tuples: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    refuses: Callable[[Any], str | None] = _refuses_none
    inferred: bool = False

    def pairs_of(self, config: Any) -> tuple[Pair, ...]:
        """The pairs that a model of this config has."""
        return tuple(pair for pair in self.pairs if pair.holds(config))

    def unpaired_of(self, config: Any) -> dict[str, str]:
        """The linear layers of a block that no pair of this config has as a target, and why."""
        targets = {target for pair in self.pairs_of(config) for target in pair.targets}
        return {name: why for name, why in self.unpaired if name not in targets}

    def module_tensors(self, stored: Iterable[str]) -> dict[str, str]:
        """Names of a checkpoint's tensors to those of the modules' tensors that they are.

        Checkpoints of the bare decoder, without a head, leave its name out.
        """
        stored = list(stored)
        decoder = self.blocks.split(".", 1)[0] + "."
        bare = not any(name.startswith(decoder) for name in stored)

        def module_tensor(name: str) -> str:
            for old, new in self.renamed:
                if name.startswith(old):
                    return new + name[len(old) :]
            return decoder + name if bare and not name.startswith(f"{self.head}.") else name

        return {name: module_tensor(name) for name in stored}

    def stored_tensor(self, name: str) -> str:
        """The name that a module's tensor has in a checkpoint."""
        for old, new in self.renamed:
            if name.startswith(new):
                return old + name[len(new) :]
        return name
