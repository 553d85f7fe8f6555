"""Number formats as data: how a weight's values are coded, at what granularity, and what that costs.

The words are compressed-tensors' own (`num_bits`, `type`, `symmetric`, `strategy`, `group_size`, `dynamic`),
so that a recipe, a plan and a checkpoint say the same thing. A `Scheme` is only a value: the arithmetic is
in `numerics`, the bytes in `formats`. A preset is a named value in `PRESETS`; a recipe may also spell one out.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Strategy = Literal["tensor", "channel", "group", "token"]

SCALE_BYTES = 2  # scales are stored in bfloat16


class QuantArgs(BaseModel):
    """How one tensor is coded.

    Attributes:
        num_bits: width of a code, 2 to 8.
        type: "int".
        symmetric: no zero point; the code 0 means 0.
        strategy: what shares a scale: the tensor, an output channel (a row), a group of `group_size` values
            along the input, or (activations only) a token.
        group_size: input values that share a scale, with strategy "group".
        dynamic: the scale is found while running (activations only).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bits: int = Field(ge=2, le=8)
    type: Literal["int"] = "int"
    symmetric: bool = True
    strategy: Strategy = "channel"
    group_size: int | None = Field(default=None, ge=8)
    dynamic: bool = False

    @model_validator(mode="after")
    def _group_size_with_groups(self) -> Self:
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError("`group_size` goes with `strategy: group`, and only with it")
        return self

    @property
    def qmin(self) -> int:
        """Smallest code; codes are signed."""
        return -(1 << (self.num_bits - 1))

    @property
    def qmax(self) -> int:
        """Largest code."""
        return (1 << (self.num_bits - 1)) - 1


class Scheme(BaseModel):
    """The coding of a layer: its weights and, where they are quantized too, its input activations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: QuantArgs
    input_activations: QuantArgs | None = None

    @model_validator(mode="after")
    def _weights_are_static(self) -> Self:
        if self.weights.dynamic or self.weights.strategy == "token":
            raise ValueError("`dynamic` and `strategy: token` are for input_activations, not for weights")
        return self

    def with_group_size(self, group_size: int) -> Self:
        """The same scheme with other groups."""
        weights = self.weights.model_copy(update={"strategy": "group", "group_size": group_size})
        return self.model_copy(update={"weights": weights})

    @property
    def text(self) -> str:
        """A short name that says everything, such as "int4 sym group 64"."""
        w = self.weights
        grain = f"group {w.group_size}" if w.strategy == "group" else w.strategy
        name = f"{w.type}{w.num_bits} {'sym' if w.symmetric else 'asym'} {grain}"
        a = self.input_activations
        return name + (f" + act {a.type}{a.num_bits} {a.strategy}" if a else "")


def scale_count(args: QuantArgs, shape: tuple[int, int]) -> int:
    """How many scales a weight of `shape` [O, I] has."""
    out_features, in_features = shape
    if args.strategy == "tensor":
        return 1
    return out_features * (in_features // args.group_size if args.group_size else 1)


def weight_bytes(scheme: Scheme | None, shape: tuple[int, int]) -> int:
    """Bytes of a stored weight of `shape` [O, I] with its scales and zero points; None is bfloat16.

    Rows are padded to whole 32-bit words, as the packed formats do; the packed formats' shape record (16
    bytes a weight) is counted too.
    """
    out_features, in_features = shape
    if scheme is None:
        return 2 * out_features * in_features
    args = scheme.weights
    groups = scale_count(args, shape) // out_features or 1
    code_bytes = 4 * out_features * -(-in_features * args.num_bits // 32)
    zero_bytes = 0 if args.symmetric else 4 * groups * -(-out_features * args.num_bits // 32)
    return code_bytes + SCALE_BYTES * scale_count(args, shape) + zero_bytes + 16


def _int(num_bits: int, group_size: int | None, symmetric: bool = True) -> Scheme:
    strategy: Strategy = "group" if group_size else "channel"
    return Scheme(weights=QuantArgs(num_bits=num_bits, symmetric=symmetric, strategy=strategy, group_size=group_size))


PRESETS: dict[str, Scheme] = {
    "W2A16": _int(2, 128),
    "W3A16": _int(3, 128),
    "W4A16": _int(4, 128),
    "W4A16_ASYM": _int(4, 128, symmetric=False),
    "W8A16": _int(8, None),
}

DENSE = "dense"  # in place of a scheme's name: leave the weight as it is
