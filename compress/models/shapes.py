"""What planning needs to know of a model, read off its skeleton: no weights are touched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from compress.models.family import ModelFamily, Pair
from compress.models.files import max_positions
from compress.models.load import TransposedLinear, linears


@dataclass(frozen=True)
class ModelShapes:
    """What planning needs of a model.

    Attributes:
        linears: (name, (O, I)) of every linear layer.
        other_params: parameters that are not linear weights (embeddings, norms, biases).
        block_count, hidden_size, vocab_size: as usual.
        max_position: tokens of the longest context.
        kv_bytes_per_token: bfloat16 keys and values of one token over all layers.
        tied: the head is the embedding.
        param_bytes: bytes of a parameter as stored.
        head: the head's name.
        transposed: linear layers that checkpoints store as [I, O].
        pairs: what smoothing can scale in a block.
        unpaired: layers of a block whose input cannot, and why.
    """

    linears: tuple[tuple[str, tuple[int, int]], ...]
    other_params: int
    block_count: int
    hidden_size: int
    vocab_size: int
    max_position: int
    kv_bytes_per_token: int
    tied: bool
    param_bytes: int = 2
    head: str = "lm_head"
    transposed: frozenset[str] = frozenset()
    pairs: tuple[Pair, ...] = ()
    unpaired: tuple[tuple[str, str], ...] = ()

    @property
    def params(self) -> int:
        """Parameters of the model; a tied head counts once."""
        counted = [o * i for name, (o, i) in self.linears if not (self.tied and name == self.head)]
        return sum(counted) + self.other_params


def shapes_of(model: nn.Module, family: ModelFamily, config: Mapping[str, Any]) -> ModelShapes:
    """The shapes of a skeleton; a tied head's weight is counted once, as the embedding."""
    found = tuple((name, shape) for name, shape, _ in linears(model))
    settings: Any = model.config
    tied = bool(settings.tie_word_embeddings)
    linear_names = {f"{name}.weight" for name, _ in found}
    other = sum(p.numel() for name, p in model.named_parameters() if name not in linear_names)
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    blocks = len(model.get_submodule(family.blocks))  # type: ignore[arg-type]
    return ModelShapes(
        linears=found,
        other_params=other,
        block_count=blocks,
        hidden_size=settings.hidden_size,
        vocab_size=settings.vocab_size,
        max_position=max_positions(config),
        kv_bytes_per_token=2 * 2 * blocks * _kv_heads(settings) * head_dim,
        tied=tied,
        param_bytes=4 if str(config.get("dtype") or config.get("torch_dtype")) == "float32" else 2,
        head=family.head,
        transposed=frozenset(n for n, m in model.named_modules() if isinstance(m, TransposedLinear)),
        pairs=family.pairs_of(settings),
        unpaired=tuple(family.unpaired_of(settings).items()),
    )


def _kv_heads(settings: Any) -> int:
    """Key and value heads; Falcon's config chooses between one, some and all."""
    if hasattr(settings, "new_decoder_architecture"):
        grouped = settings.new_decoder_architecture or not settings.multi_query
        return int(settings.num_kv_heads if grouped else 1)
    return int(getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads)
