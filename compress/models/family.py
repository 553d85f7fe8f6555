"""What the toolkit knows about a model family: the names of its parts, as data."""

from dataclasses import dataclass


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
    """

    model_type: str
    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    fused: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    )
