"""Number formats as data: how a weight's values are coded, at what granularity, and what that costs.

The words are compressed-tensors' own (`num_bits`, `type`, `symmetric`, `strategy`, `group_size`,
`block_structure`, `dynamic`), so that a recipe, a plan and a checkpoint say the same thing. A `Scheme` is only a
value: the arithmetic is in `numerics`, the bytes in `formats`. A preset is a named value in `PRESETS`, and means what
compressed-tensors' preset of that name means (except W8A16, which is per channel here); a recipe may also spell one
out. What no loader could run is refused here, with the reason.

Left out: activations of fewer than 8 bits (NVFP4 and MXFP4 code weights only), integer weights of fewer bits with
quantized activations, zero points for activations, 6-bit floats and MXFP8.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Strategy = Literal["tensor", "channel", "group", "token", "block", "tensor_group", "super_group"]

SCALE_BYTES = 2  # scales are stored in bfloat16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
SUPER = 256  # columns of a super-group
_SUPER = {2: (16, False), 3: (16, True), 4: (32, False), 5: (32, False), 6: (16, True)}  # bits: group size, symmetric
_FLOAT4 = {("tensor_group", 16), ("group", 32)}  # NVFP4 and MXFP4: the only grains in which 4-bit floats exist
_ACTIVATIONS = {("token", True), ("tensor", False), ("group", True)}  # (strategy, dynamic)


class QuantArgs(BaseModel):
    """How one tensor is coded.

    Attributes:
        num_bits: width of a code: 2 to 8 for integers, 8 (E4M3) or 4 (E2M1) for floats.
        type: "int" or "float".
        symmetric: no zero point; the code 0 means 0.
        strategy: what shares a scale: the tensor, an output channel (a row), a group of `group_size` values
            along the input, a block of rows and columns, or (activations only) a token. "tensor_group" is NVFP4's:
            groups whose 8-bit scales share one scale of the tensor. "super_group" is that of llama.cpp's K-quants:
            groups whose scales (and least values) are small integers, multiples of a step that 256 columns share.
        group_size: input values that share a scale, with strategies "group", "tensor_group" and "super_group".
        block_structure: rows and columns of a block, with strategy "block".
        dynamic: the scale is found while running (activations only).
        actorder: "group": groups are cut after the columns have been sorted by the size of their inputs, so that a
            column's group is not its place (AutoGPTQ's `g_idx`); else None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bits: int = Field(ge=2, le=8)
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Strategy = "channel"
    group_size: int | None = Field(default=None, ge=8)
    block_structure: tuple[int, int] | None = None
    dynamic: bool = False
    actorder: Literal["group"] | None = None

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.actorder and (self.type != "int" or self.strategy != "group"):
            raise ValueError("`actorder: group` is for integers in groups")
        if (self.strategy in ("group", "tensor_group", "super_group")) != (self.group_size is not None):
            raise ValueError("`group_size` goes with a `strategy` of groups, and only with one")
        if self.strategy == "super_group" and _SUPER.get(self.num_bits) != (self.group_size, self.symmetric):
            known = ", ".join(f"{bits} ({size})" for bits, (size, _) in _SUPER.items())
            raise ValueError(
                f"`strategy: super_group` has these bits (and group_size): {known}; those of 3 and 6 are symmetric"
            )
        if (self.strategy == "block") != (self.block_structure is not None):
            raise ValueError("`block_structure: [rows, columns]` goes with `strategy: block`, and only with it")
        if self.block_structure is not None and min(self.block_structure) < 1:
            raise ValueError("`block_structure` counts rows and columns, at least 1 of each")
        if self.strategy == "token" and not self.dynamic:
            raise ValueError("a scale for each token can only be found while running: `dynamic: true`")
        if self.type == "float":
            self._check_float()
        elif self.strategy in ("block", "tensor_group"):
            raise ValueError(f"`strategy: {self.strategy}` is for floats (`type: float`)")
        return self

    def _check_float(self) -> None:
        if self.num_bits not in (4, 8):
            raise ValueError("floats have 8 bits (E4M3) or 4 (E2M1)")
        if not self.symmetric:
            raise ValueError("floats have no zero point: leave `symmetric` true")
        if self.num_bits == 4 and (self.strategy, self.group_size) not in _FLOAT4:
            raise ValueError(
                "4-bit floats are NVFP4 (`strategy: tensor_group, group_size: 16`) or "
                "MXFP4 (`strategy: group, group_size: 32`)"
            )
        if self.strategy == "super_group":
            raise ValueError("`strategy: super_group` is for integers")
        if self.num_bits == 8 and self.strategy == "tensor_group":
            raise ValueError("`strategy: tensor_group` is for 4-bit floats (NVFP4)")

    @property
    def divisible(self) -> bool:
        """Whether rows can be divided by dividing their scales: each has its own, in bfloat16."""
        return (self.type == "int" and self.strategy in ("group", "channel")) or (
            self.type == "float" and self.num_bits == 8 and self.strategy == "channel"
        )

    @property
    def qmin(self) -> float:
        """Smallest code value; integer codes are signed."""
        return -self.qmax if self.type == "float" else -(1 << (self.num_bits - 1))

    @property
    def qmax(self) -> float:
        """Largest code value."""
        if self.type == "float":
            return E4M3_MAX if self.num_bits == 8 else E2M1_MAX
        return (1 << (self.num_bits - 1)) - 1

    @property
    def scale_kind(self) -> Literal["bfloat16", "e4m3", "e8m0", "steps"]:
        """What a scale is stored as: bfloat16; E4M3 under a scale of the tensor; a power of two (E8M0); steps."""
        if self.strategy == "super_group":
            return "steps"
        if self.type == "int" or self.num_bits == 8:
            return "bfloat16"
        return "e4m3" if self.strategy == "tensor_group" else "e8m0"

    @property
    def most_steps(self) -> int:
        """The largest scale of a group, in steps of its super-group."""
        assert self.strategy == "super_group"
        return {2: 15, 3: 31, 6: 127}.get(self.num_bits, 63)

    def span(self, in_features: int) -> int:
        """How many neighbouring input values of a row share a scale."""
        return self.group_size or (self.block_structure[1] if self.block_structure else in_features)


class Scheme(BaseModel):
    """The coding of a layer: its weights and, where they are quantized too, its input activations."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: QuantArgs
    input_activations: QuantArgs | None = None

    @model_validator(mode="after")
    def _exists(self) -> Self:
        w, a = self.weights, self.input_activations
        if w.dynamic or w.strategy == "token":
            raise ValueError("`dynamic` and `strategy: token` are for input_activations, not for weights")
        if w.type == "float" and w.num_bits == 8 and w.strategy == "group":
            raise ValueError("8-bit float weights have a scale per tensor, channel or block, not per group")
        if a is not None:
            self._check_activations(w, a)
        return self

    @staticmethod
    def _check_activations(w: QuantArgs, a: QuantArgs) -> None:
        if a.num_bits != 8 or not a.symmetric:
            raise ValueError("input_activations have 8 bits and no zero point")
        if (a.strategy, a.dynamic) == ("tensor", True):
            raise ValueError(
                "a dynamic scale of a whole tensor would change with what else is in the batch: "
                "use `strategy: token`, or `dynamic: false`"
            )
        if (a.strategy, a.dynamic) not in _ACTIVATIONS:
            raise ValueError(
                "input_activations are scaled per token (`dynamic: true`), per tensor (`dynamic: false`) "
                "or, below blocks, per group (`dynamic: true`)"
            )
        if (w.type, w.num_bits, w.symmetric) != (a.type, 8, True):
            raise ValueError("quantized input_activations go with symmetric 8-bit weights of the same type")
        if w.strategy == "group":
            raise ValueError("quantized input_activations go with weights that have a scale per tensor or channel")
        if (a.strategy == "group") != (w.strategy == "block") or (w.block_structure and w.span(0) != a.group_size):
            raise ValueError("weights in blocks go with input_activations in groups of the block's columns")

    @property
    def regroups(self) -> bool:
        """Whether its weights may be cut into other groups."""
        w = self.weights
        return w.type == "int" and w.strategy != "super_group" and self.input_activations is None

    def with_group_size(self, group_size: int) -> Self:
        """The same scheme with other groups."""
        assert self.regroups
        weights = self.weights.model_copy(update={"strategy": "group", "group_size": group_size})
        return self.model_copy(update={"weights": weights})

    def reordered(self) -> Self:
        """The same scheme with groups cut in the order of the columns' inputs."""
        return self.model_copy(update={"weights": self.weights.model_copy(update={"actorder": "group"})})

    @property
    def static_inputs(self) -> bool:
        """Whether the scale of its input activations has to be measured beforehand."""
        return self.input_activations is not None and not self.input_activations.dynamic

    @property
    def text(self) -> str:
        """A short name that says everything, such as "int4 sym group 64" or "float8 channel + act float8 token"."""
        w, a = self.weights, self.input_activations
        symmetry = "" if w.type == "float" else " sym" if w.symmetric else " asym"
        name = f"{w.type}{w.num_bits}{symmetry} {_grain(w)}"
        return name + (f" + act {a.type}{a.num_bits} {_grain(a)}{'' if a.dynamic else ' static'}" if a else "")


def _grain(args: QuantArgs) -> str:
    if args.block_structure:
        return "block {}×{}".format(*args.block_structure)
    if args.strategy == "super_group":
        return f"Q{args.num_bits}_K"
    order = ", act-order" if args.actorder else ""
    return f"{args.strategy} {args.group_size}{order}" if args.group_size else args.strategy


def misfit(scheme: Scheme, shape: tuple[int, int]) -> str | None:
    """Why a weight of `shape` [O, I] cannot be coded so: what does not divide what; None when it can."""
    w = scheme.weights
    rows, columns = w.block_structure or (1, SUPER if w.strategy == "super_group" else w.span(shape[1]))
    if shape[0] % rows == 0 and shape[1] % columns == 0:
        return None
    if w.block_structure:
        return f"block_structure [{rows}, {columns}] does not divide its {shape[0]} rows and {shape[1]} columns"
    what = "a super-group of 256 columns" if w.strategy == "super_group" else f"group_size {columns}"
    return f"{what} does not divide its input width {shape[1]}"


def scale_count(args: QuantArgs, shape: tuple[int, int]) -> int:
    """How many scales a weight of `shape` [O, I] has."""
    out_features, in_features = shape
    if args.strategy == "tensor":
        return 1
    rows = args.block_structure[0] if args.block_structure else 1
    return out_features // rows * (in_features // args.span(in_features))


def weight_bytes(scheme: Scheme | None, shape: tuple[int, int]) -> int:
    """Bytes of a stored weight of `shape` [O, I] with its scales and zero points; None is bfloat16.

    Rows of packed integers are padded to whole 32-bit words, and their shape record (16 bytes a weight) is
    counted too; codes of 8 bits beside quantized activations, and floats, are stored as they are.
    """
    out_features, in_features = shape
    if scheme is None:
        return 2 * out_features * in_features
    args = scheme.weights
    scales = scale_count(args, shape)
    inputs = SCALE_BYTES if scheme.static_inputs else 0
    if args.type == "float" and args.num_bits == 4:
        return out_features * in_features // 2 + scales + (4 if args.strategy == "tensor_group" else 0)
    if args.type == "float" or scheme.input_activations is not None:
        return out_features * in_features + SCALE_BYTES * scales + inputs
    groups = scales // out_features or 1
    code_bytes = 4 * out_features * -(-in_features * args.num_bits // 32)
    zero_bytes = 0 if args.symmetric else 4 * groups * -(-out_features * args.num_bits // 32)
    return code_bytes + SCALE_BYTES * scales + zero_bytes + 16


def _int(num_bits: int, group_size: int | None, symmetric: bool = True) -> Scheme:
    strategy: Strategy = "group" if group_size else "channel"
    return Scheme(weights=QuantArgs(num_bits=num_bits, symmetric=symmetric, strategy=strategy, group_size=group_size))


def _eight(
    kind: Literal["int", "float"], strategy: Strategy, inputs: Strategy, group_size: int | None = None
) -> Scheme:
    """8-bit weights and inputs; `group_size` is that of inputs below square blocks."""
    block = (group_size, group_size) if group_size else None
    return Scheme(
        weights=QuantArgs(num_bits=8, type=kind, strategy=strategy, block_structure=block),
        input_activations=QuantArgs(
            num_bits=8, type=kind, strategy=inputs, group_size=group_size, dynamic=inputs != "tensor"
        ),
    )


def _float4(strategy: Strategy, group_size: int) -> Scheme:
    return Scheme(weights=QuantArgs(num_bits=4, type="float", strategy=strategy, group_size=group_size))


def _super(num_bits: int) -> Scheme:
    size, symmetric = _SUPER[num_bits]
    return Scheme(weights=QuantArgs(num_bits=num_bits, symmetric=symmetric, strategy="super_group", group_size=size))


K_QUANTS: dict[str, Scheme] = {f"Q{bits}_K": _super(bits) for bits in _SUPER}  # llama.cpp's

PRESETS: dict[str, Scheme] = {
    "W2A16": _int(2, 128),
    "W3A16": _int(3, 128),
    "W4A16": _int(4, 128),
    "W4A16_ASYM": _int(4, 128, symmetric=False),
    "W8A16": _int(8, None),
    "W8A8": _eight("int", "channel", "token"),
    "W8A8_STATIC": _eight("int", "channel", "tensor"),
    "FP8": _eight("float", "tensor", "tensor"),
    "FP8_DYNAMIC": _eight("float", "channel", "token"),
    "FP8_BLOCK": _eight("float", "block", "group", 128),
    "NVFP4A16": _float4("tensor_group", 16),
    "MXFP4A16": _float4("group", 32),
    **K_QUANTS,
}

KV_CACHES: dict[str, QuantArgs] = {"FP8": QuantArgs(num_bits=8, type="float", strategy="tensor")}
CACHE_SCALES = ("k_scale", "v_scale")  # what an attention layer's checkpoint tensors are called, bfloat16 [1] each

DENSE = "dense"  # in place of a scheme's name: leave the weight as it is
