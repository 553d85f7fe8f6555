"""What a method is: a name, a paper, a frozen config, the statistics that it needs, its kind and its step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compress.schemes import Scheme


class Override(BaseModel):
    """Another scheme for the weights whose name matches a shell pattern."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: str
    scheme: str | Scheme


class StepConfig(BaseModel):
    """The keys of a step of a recipe.

    Attributes:
        scheme: how the weights are coded; null where the step leaves that to a later one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    scheme: str | Scheme | None = None
    group_size: int | None = Field(default=None, ge=8)
    group_fallback: tuple[Annotated[int, Field(ge=8)], ...] = ()
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True)
class Method:
    """One compression algorithm.

    Attributes:
        name: as recipes say it.
        paper: where it comes from.
        config: the frozen type of its recipe step.
        statistics: what it needs of the calibration activations: "gram", or None when it is data-free.
        kind: "block" steps code a block's weights inside the walk, "smooth" steps only scale its channels there;
            "model" steps work on a whole model.
        step: `step(block, rows, config)`, which sets the block's coded weights; None where it codes nothing.
        smooth: `smooth(block, names, statistics, config)`, called for each group of weights that read one input, before
            they are coded; None where it scales nothing.
    """

    name: str
    paper: str
    config: type[StepConfig]
    statistics: Literal["gram", "absmax"] | None
    kind: Literal["block", "smooth", "model"]
    step: Callable[[Any, dict[str, Scheme], Any], None] | None
    smooth: Callable[[Any, list[str], Any, Any], None] | None = None
