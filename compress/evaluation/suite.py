"""A suite says what is measured, as a YAML file in eval/suites or anywhere else."""

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from compress.errors import CompressError, nearest
from compress.evaluation.prompts import Prompts, load_prompts
from compress.paths import data_dir
from compress.yaml_files import find_yaml, place, read_text, read_yaml, validate

BINARY = ("acc", "acc_norm")  # metrics that are right or wrong for each document
TASK_METRICS = (*BINARY, "word_perplexity", "byte_perplexity", "bits_per_byte")


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


class Task(BaseModel):
    """A task of lm-eval or of eval/tasks, and the metric that counts of those it reports."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str = "acc"

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str) -> str:
        if metric not in TASK_METRICS:
            raise ValueError(f"unknown metric {metric!r}; {nearest(metric, TASK_METRICS)}")
        return metric


class Accuracy(BaseModel):
    """The tasks, and which of their documents: the name of a file in eval/samples, a path, or all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: tuple[Task, ...] = Field(min_length=1)
    sample: str | None = None

    @field_validator("tasks")
    @classmethod
    def _once(cls, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        names = [task.task for task in tasks]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled:
            raise ValueError(f"task {doubled!r} stands twice")
        return tasks


class Generation(BaseModel):
    """The prompts that both models continue: the name of a file in eval/prompts, or a path; and how many tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: str
    output: int = Field(default=48, ge=1)


class SpeedPoint(BaseModel):
    """One condition of the speed measurement, in sequences and tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    output: int = Field(ge=2)


class Suite(BaseModel):
    """What is measured of base and artifact, and on what the verdict rests (`basis`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    name: str = "?"
    summary: str
    text: Text = Text()
    accuracy: Accuracy | None = None
    generation: Generation | None = None
    basis: Literal["perplexity", "accuracy"] = "perplexity"
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
    found = validate(Suite, {"name": path.stem, **document}, str(path), node, ())
    if found.accuracy and found.accuracy.sample:
        accuracy = found.accuracy.model_copy(update={"sample": _beside(path, found.accuracy.sample)})
        found = found.model_copy(update={"accuracy": accuracy})
    if found.generation:
        generation = found.generation.model_copy(update={"prompts": _beside(path, found.generation.prompts)})
        found = found.model_copy(update={"generation": generation})
        prompts_of(found)
    tasks = found.accuracy.tasks if found.accuracy else ()
    if found.basis == "accuracy" and not any(task.metric in BINARY for task in tasks):
        raise CompressError(
            "basis: accuracy needs a task with the metric acc or acc_norm",
            where=place(str(path), node, ("basis",)),
            hint="name such a task under `accuracy`, or let the verdict rest on perplexity",
        )
    load_sample(found)
    return found


def _beside(suite: Path, name: str) -> str:
    """A file's path where the name is one, relative to the suite's folder; else the name."""
    path = suite.parent / Path(name).expanduser()
    return str(path.resolve()) if path.is_file() else name


def prompts_of(suite: Suite) -> Prompts:
    """The prompts of a suite that has some.

    Raises:
        CompressError: no such set, or a wrong key in it.
    """
    assert suite.generation is not None
    return load_prompts(suite.generation.prompts)


class Sample(BaseModel):
    """Chosen documents by their hashes, and about how many tokens they have (SmolLM2's tokenizer)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str
    tokens: int = Field(ge=0)
    documents: dict[str, tuple[str, ...]]


def load_sample(suite: Suite) -> Sample | None:
    """The suite's sample; None where all documents are scored.

    Raises:
        CompressError: no such sample, or one without a task of the suite.
    """
    if suite.accuracy is None or suite.accuracy.sample is None:
        return None
    name = suite.accuracy.sample
    folder = data_dir("eval") / "samples"
    path = folder / f"{name}.json"
    if not path.is_file():
        path = Path(name).expanduser()
    try:
        sample = Sample.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        known = [p.stem for p in folder.glob("*.json")]
        hint = "name a file of eval/samples, give a path, or leave `sample` out to ask all documents"
        what = f"unknown sample {name!r}; {nearest(name, known)}"
        raise CompressError(what, where=f"suite {suite.name}, accuracy.sample", hint=hint) from error
    except ValueError as error:
        hint = "a sample is JSON: {summary, tokens, documents: {TASK: [HASH, …]}}"
        what = f"the sample is not valid: {str(error).splitlines()[0]}"
        raise CompressError(what, where=str(path), hint=hint) from error
    absent = [task.task for task in suite.accuracy.tasks if not sample.documents.get(task.task)]
    if absent:
        hint = "name another sample, or leave `sample` out to ask all documents"
        raise CompressError(f"the sample has no document of task {absent[0]!r}", where=str(path), hint=hint)
    return sample
