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
    """The keys that every quantizing step of a recipe has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    scheme: str | Scheme
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
        kind: "block" steps run inside the walk; "model" steps on a whole model.
        step: `step(block, rows, config)`, which sets the block's coded weights.
    """

    name: str
    paper: str
    config: type[StepConfig]
    statistics: Literal["gram"] | None
    kind: Literal["block", "model"]
    step: Callable[[Any, dict[str, Scheme], Any], None]
