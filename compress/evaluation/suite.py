"""A suite says what is measured, as a YAML file in eval/suites or anywhere else."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from compress.paths import data_dir
from compress.recipe import find_yaml, read_text, read_yaml, validate


class Text(BaseModel):
    """The text of perplexity and KL divergence: `embedded` or `file:PATH`, and how much of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = "embedded"
    windows: int = Field(default=16, ge=1)
    seq_len: int = Field(default=512, ge=8)

    @property
    def name(self) -> str:
        """The text's name in reports: no folders of this machine."""
        return self.dataset.rsplit("/", 1)[-1].removeprefix("file:")


class SpeedPoint(BaseModel):
    """One condition of the speed measurement, in sequences and tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    output: int = Field(ge=2)


class Suite(BaseModel):
    """What is measured of base and artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    name: str = "?"
    summary: str
    text: Text = Text()
    speed: tuple[SpeedPoint, ...] = ()


def suite_names() -> list[str]:
    """The shipped suites."""
    return sorted(p.stem for p in (data_dir("eval") / "suites").glob("*.yaml"))


def load_suite(suite: str) -> Suite:
    """A suite by name or by path.

    Raises:
        CompressError: no such suite, or a wrong key in it.
    """
    path = find_yaml(suite, data_dir("eval") / "suites", suite_names(), "suite")
    node, document = read_yaml(read_text(path, "suite"), str(path))
    return validate(Suite, {"name": path.stem, **document}, str(path), node, ())
