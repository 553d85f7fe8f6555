"""A suite says what is measured, as a YAML file in eval/suites or anywhere else."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from compress.errors import CompressError, nearest
from compress.paths import data_dir
from compress.recipe import read_yaml, validate


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
    path = data_dir("eval") / "suites" / f"{suite}.yaml"
    if suite not in suite_names():
        path = Path(suite).expanduser()
        if not path.is_file():
            raise CompressError(f"unknown suite {suite!r}; {nearest(suite, suite_names())}")
    node, document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return validate(Suite, {"name": path.stem, **document}, str(path), node, ())
