"""Prompts that models are to continue: a YAML file in eval/prompts or anywhere else.

They are plain text, taken as it stands: no chat template, so that models with and without one are asked the same.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from compress.paths import data_dir
from compress.yaml_files import find_yaml, read_text, read_yaml, validate


class Prompt(BaseModel):
    """A text to be continued, and a word for what kind of text it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "text"
    text: str = Field(min_length=1)


class Prompts(BaseModel):
    """A set of prompts; `name` is its file's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    name: str = "?"
    summary: str
    prompts: tuple[Prompt, ...] = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        """What the models are shown."""
        return [prompt.text for prompt in self.prompts]


def load_prompts(name: str) -> Prompts:
    """The prompts of a shipped name, or of a path.

    Raises:
        CompressError: no such set, or a wrong key in it.
    """
    folder = data_dir("eval") / "prompts"
    path = find_yaml(name, folder, sorted(p.stem for p in folder.glob("*.yaml")), "prompt set")
    node, document = read_yaml(read_text(Path(path), "prompt set"), str(path))
    return validate(Prompts, {"name": path.stem, **document}, str(path), node, ())
