"""What is measured of a checkpoint that is there: stages by their keys, each published as it ends."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress import artifact, keys
from compress.evaluation import card, continuations, draw, generation, memory, page, questions, report, speed
from compress.evaluation.compare import Results, accuracy_rows, verdict
from compress.evaluation.likelihood import WINDOW
from compress.evaluation.metrics import METRICS, Row, row
from compress.evaluation.rows import DIVERGENCE
from compress.evaluation.suite import TASK_METRICS, Suite, prompts_of
from compress.evaluation.timing import Point
from compress.evaluation.worker import measure_fidelity, streamed
from compress.files import replace
from compress.paths import cache_dir
from compress.plan import read_plan
from compress.plan_text import plan_text
from compress.runtimes.hf import parameter_count
from compress.verify import Request, verify

Progress = Callable[[str, int, int], None]  # what runs, how much is done, of how much
Document = dict[str, Any]
_READING = (  # what makes a model of a checkpoint
    "activations.py", "numerics.py", "schemes.py", "artifact.py", "formats/*.py", "models/*.py", "runtimes/hf.py",
)  # fmt: skip
_TIMING = tuple(f"evaluation/{name}.py" for name in ("speed", "speed_rows", "timing", "machine", "energy"))
_FIDELITY = ("perplexity", "nll_delta", "kld_floor", "nonfinite", *DIVERGENCE)
_ACCURACY = ("target_perplexity", "acc_delta", "flips", "mcnemar_p", "smallest_difference", "recovery", *TASK_METRICS)


UNFINISHED = "not everything is measured yet: the same command goes on from here"


class Skipped(Exception):
    """A stage that cannot be run here, and why; the next evaluation tries again."""


@dataclass(frozen=True)
class Evaluation:
    """What is measured of a checkpoint.

    Attributes:
        home: the folder of report and lock; for an artifact of ours, the artifact's.
        artifact, base: folders of checkpoints; without a base nothing is compared.
        suite: what is measured.
        tokens_NT: the windows of the suite's text.
        delta: the difference in accuracy that still counts as "as good".
        made: the key of the artifact's weights.
        ours: whether the artifact was made here, so that transformers must give the logits that we compute.
    """

    home: Path
    artifact: Path
    base: Path | None
    suite: Suite
    tokens_NT: torch.Tensor
    delta: float
    made: str
    ours: bool

    @property
    def folders(self) -> list[Path]:
        """The checkpoints, base first."""
        return [folder for folder in (self.base, self.artifact) if folder is not None]

    @property
    def depends(self) -> list[Any]:
        """What every stage depends on, as plain data."""
        libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
        versions = {name: metric.version for name, metric in METRICS.items()}
        return [self.made, None if self.base is None else keys.checkpoint_key(self.base), libraries, versions]


Run = Callable[[Evaluation, Progress], list[Row] | Document]


@dataclass(frozen=True)
class Stage:
    """One part of an evaluation.

    Attributes:
        key: the hash of what it depends on.
        run: gives its rows; "whole" gives findings for `verified`.
        owns: whether a row of the report is this stage's.
        note: what the report says when the stage cannot be run here.
    """

    key: str
    run: Run
    owns: Callable[[Row], bool]
    note: str


def evaluate(asked: Evaluation, document: Document, progress: Progress) -> Document:
    """The suite's stages that the lock does not name yet; each is published as it ends."""
    stages = _stages(asked)
    lock = artifact.read_lock(asked.home)
    missing = [name for name, stage in stages.items() if lock["stages"].get(name) != stage.key]
    if missing:  # until the end the report says that it is not whole, and the lock that it is not drawn
        for name in missing:
            lock["stages"].pop(name, None)
        document = publish(asked.home, with_note(document, UNFINISHED), lock, charts=False)
    for name in missing:
        document, done = _run(stages[name], asked, document, progress)
        if done:
            lock["stages"][name] = stages[name].key
        document = publish(asked.home, with_verdict(document, asked), lock, charts=False)
    judged = with_verdict(_without_note(document, UNFINISHED), asked)
    suite = asked.suite.model_dump(mode="json")
    if judged != document or lock.get("suite") != suite or not lock.get("drawn"):
        lock["suite"] = suite
        document = publish(asked.home, judged, lock, charts=True)
    return document


def _run(stage: Stage, asked: Evaluation, document: Document, progress: Progress) -> tuple[Document, bool]:
    """The document with a stage's rows in place of its old ones, and whether it could be run."""
    document = _without_note(document, stage.note)
    try:
        found = stage.run(asked, progress)
    except Skipped:
        return _with_rows(with_note(document, stage.note), [], stage.owns), False
    if isinstance(found, dict):
        return {**document, "verified": {**document["verified"], **found}}, True
    return _with_rows(document, found, stage.owns), True


def check(asked: Evaluation) -> None:
    """Refuses what the stages that are to run would refuse, before any of them and before the walk.

    Raises:
        CompressError: a task of the suite, or its documents, cannot be had; prompts are too long.
    """
    known, stages = artifact.read_lock(asked.home).get("stages", {}), _stages(asked)
    if asked.suite.accuracy and known.get("accuracy") != stages["accuracy"].key:
        questions.documents(asked.suite)
    if asked.suite.generation and known.get("generation") != stages["generation"].key:
        continuations.prompt_ids(asked.suite, asked.folders[0])


def _stages(asked: Evaluation) -> dict[str, Stage]:
    """The stages in the order in which they run."""
    suite = asked.suite
    tasks = suite.accuracy.model_dump() if suite.accuracy else None
    prompts = [prompts_of(suite).texts, prompts_of(suite).name, suite.generation.output] if suite.generation else None
    text = [suite.text.name, artifact.digest(asked.tokens_NT.tolist())]
    timed = [[p.model_dump() for p in suite.speed], torch.get_num_threads(), memory.cpu_name()]

    def key(depends: list[Any], *sources: str) -> str:
        return keys.stage_key([*asked.depends, depends], *_READING, *(f"evaluation/{s}.py" for s in sources))

    speed_key = keys.stage_key([*asked.depends, timed], *_READING, "runtimes/*.py", *_TIMING)
    stages = {
        "whole": Stage(
            keys.stage_key([*asked.depends], *_READING, "verify.py"), _reload, lambda _: False,
            "not loaded whole by transformers: in float32 it does not fit in memory here",
        ),
        "fidelity": Stage(
            key(text, "fidelity", "intervals", "worker", "stream"), _fidelity,
            lambda r: r["metric"] in _FIDELITY and bool(r["conditions"]),
            "perplexity not measured: this architecture or format is not streamed, and does not fit in memory whole",
        ),
        "accuracy": Stage(
            key(
                [tasks, questions.source(suite)], "accuracy", "likelihood", "blockwise", "questions", "compare",
                "intervals",
            ),
            _accuracy, lambda r: r["metric"] in _ACCURACY,
            "accuracy not measured: this architecture or format is not streamed, and does not fit in memory whole",
        ),
        "generation": Stage(
            key([prompts], "generation", "greedy", "continuations", "intervals"), _generation,
            lambda r: r["metric"] in generation.METRICS,
            "generation not measured: the whole model does not fit in memory here",
        ),
        "speed": Stage(
            speed_key, _speed, lambda r: bool(r["task"] == "speed"),
            "speed not measured: the whole model does not fit in memory here",
        ),
    }  # fmt: skip
    return stages if asked.ours else {name: stage for name, stage in stages.items() if name != "whole"}


def _fits(folders: list[Path], bytes_per_weight: int = 4, *, together: bool = False) -> bool:
    """Whether the whole models, each by itself or all together, take under half the free memory."""
    sizes = [bytes_per_weight * parameter_count(folder) for folder in folders]
    return (sum(sizes) if together else max(sizes)) < memory.available_memory_bytes() // 2


def _dtype(folders: list[Path]) -> str:
    """In what the whole models are computed, one at a time."""
    dtype = next((d for d, size in (("float32", 4), ("bfloat16", 2)) if _fits(folders, size)), None)
    if dtype is None:
        raise Skipped
    return dtype


def _reload(asked: Evaluation, progress: Progress) -> Document:
    """Plain transformers loads the artifact, must give our logits, and generates."""
    if not _fits([asked.artifact]):
        raise Skipped
    progress("reload", 0, 1)
    found = verify(
        Request(
            artifact=str(asked.artifact.resolve()), base="", state=None, tokens=asked.tokens_NT[:1].tolist(),
            whole=True, threads=torch.get_num_threads(),
        )
    )  # fmt: skip
    progress("reload", 1, 1)
    return found


def _fidelity(asked: Evaluation, progress: Progress) -> list[Row]:
    """Perplexity, and divergence from the base, on the suite's text."""
    runtime = "stream" if all(map(streamed, asked.folders)) else "hf"
    if runtime == "hf" and not _fits(asked.folders, together=True):
        raise Skipped
    conditions = {
        "runtime": runtime, "dtype": "float32", "seq_len": asked.suite.text.seq_len,
        "data": artifact.digest(asked.tokens_NT.tolist())[:16], **artifact.coded_activations(asked.artifact),
    }  # fmt: skip
    return measure_fidelity(
        asked.base, asked.artifact, asked.tokens_NT.tolist(), task=asked.suite.text.name, conditions=conditions,
        threads=torch.get_num_threads(), kept=_kept(asked),
        progress=lambda done, total: progress("fidelity", done, total),
    )  # fmt: skip


def _kept(asked: Evaluation) -> Path | None:
    """Where the base's hidden states of the suite's text are kept."""
    if asked.base is None:
        return None
    depends = [keys.checkpoint_key(asked.base), artifact.digest(asked.tokens_NT.tolist())]
    return cache_dir() / "hidden" / f"{keys.stage_key(depends, *_READING, 'evaluation/stream.py')}.safetensors"


def _accuracy(asked: Evaluation, progress: Progress) -> list[Row]:
    """The suite's tasks, by base and artifact on the same documents."""
    if asked.suite.accuracy is None:
        questions.forget(asked.home)
        return []
    runtime, dtype = _runtime(asked)
    documents = questions.documents(asked.suite)

    def answers(folder: Path, name: str) -> Results:
        return questions.answers(
            folder, documents, runtime=runtime, dtype=dtype, threads=torch.get_num_threads(),
            progress=lambda done, total: progress(name, done, total),
        )  # fmt: skip

    base = None if asked.base is None else answers(asked.base, "base tasks")
    found = answers(asked.artifact, "tasks")
    questions.keep(asked.home, base, found)
    conditions = {
        "runtime": runtime, "device": "cpu", "dtype": dtype, "num_fewshot": 0, "chat_template": False,
        "window": WINDOW, "sample": Path(asked.suite.accuracy.sample or "all").stem,
        "data": artifact.digest([[name for _, name in pairs] for pairs in documents.values()])[:16],
        **artifact.coded_activations(asked.artifact),
    }  # fmt: skip
    return accuracy_rows(base, found, asked.suite, conditions)


def _runtime(asked: Evaluation) -> tuple[str, str]:
    """What both models are scored by, and its dtype: whole where they fit, else block by block, else in bfloat16.

    Raises:
        Skipped: none will do.
    """
    if not _fits(asked.folders) and all(map(streamed, asked.folders)):
        return "stream", "float32"
    return "hf", _dtype(asked.folders)


def _generation(asked: Evaluation, progress: Progress) -> list[Row]:
    """What base and artifact write after the suite's prompts."""
    continuations.forget(asked.home)
    wanted = asked.suite.generation
    if wanted is None:
        return []
    dtype, prompts = _dtype(asked.folders), prompts_of(asked.suite)
    ids, ends = continuations.prompt_ids(asked.suite, asked.folders[0]), continuations.endings(asked.folders[0])

    def outputs(folder: Path, name: str) -> list[generation.Output]:
        return continuations.outputs(
            folder, ids, ends, wanted.output, dtype=dtype, threads=torch.get_num_threads(),
            progress=lambda done, total: progress(name, done, total),
        )  # fmt: skip

    base = None if asked.base is None else outputs(asked.base, "base texts")
    found = outputs(asked.artifact, "texts")
    continuations.keep(asked.home, prompts, base, found)
    conditions = {
        "runtime": "hf", "device": "cpu", "dtype": dtype, "chat_template": False, "decoding": "greedy",
        "batch": len(ids), "output": wanted.output, "data": artifact.digest(prompts.texts)[:16],
        **artifact.coded_activations(asked.artifact),
    }  # fmt: skip
    return generation.generation_rows(base, found, prompts.name, conditions)


def _speed(asked: Evaluation, progress: Progress) -> list[Row]:
    """Speed and memory of base and artifact, in turn."""
    if not asked.suite.speed:
        return []
    if not _fits(asked.folders, 2):
        raise Skipped
    return speed.measure(
        asked.base, asked.artifact, grid=[Point(p.batch, p.context, p.output) for p in asked.suite.speed],
        threads=torch.get_num_threads(), on_progress=lambda _, share: progress("speed", round(100 * share), 100),
    )  # fmt: skip


def size_rows(folder: Path, base: Path | None) -> list[Row]:
    """Bytes of the checkpoints."""
    rows = [row("size_bytes", "artifact", "checkpoint", artifact.checkpoint_bytes(folder))]
    if base is not None:
        rows.insert(0, row("size_bytes", "base", "checkpoint", artifact.checkpoint_bytes(base)))
    return rows


def with_verdict(document: Document, asked: Evaluation) -> Document:
    """The document with the verdict that its rows support."""
    return {**document, "verdict": verdict(document["measurements"], asked.suite, asked.delta)}


def with_note(document: Document, note: str) -> Document:
    """The document with a note of the artifact, once."""
    document = _without_note(document, note)
    return {**document, "artifact": {**document["artifact"], "notes": [*document["artifact"]["notes"], note]}}


def _without_note(document: Document, note: str) -> Document:
    notes = [kept for kept in document["artifact"].get("notes") or [] if kept != note]
    return {**document, "artifact": {**document["artifact"], "notes": notes}}


def _with_rows(document: Document, rows: list[Row], stale: Callable[[Row], bool]) -> Document:
    kept = [r for r in document["measurements"] if not stale(r)]
    return {**document, "measurements": kept + rows}


def publish(home: Path, document: Document, lock: dict[str, Any], *, charts: bool) -> Document:
    """Writes report, pages and card, and the lock last; recipe and plan are what the folder holds.

    Args:
        charts: whether to draw them; they take seconds, so only after the last stage.
    """
    report.write(home, document)
    document = report.read(home)  # the pages show what is stored
    drawn = draw.draw(document, home) if charts else None
    recipe_file = home / "recipe.yaml"
    recipe_yaml = recipe_file.read_text(encoding="utf-8", errors="replace") if recipe_file.is_file() else None
    plan = read_plan(home)
    text = plan_text(plan) if plan else None
    made = page.html(document, recipe_yaml, text, drawn, continuations.read(home))
    replace(home / "report.html", made.encode())
    if recipe_yaml is not None:
        name = str(document["artifact"].get("recipe") or recipe_file.stem)
        readme = card.card(document, name, recipe_yaml, lock["model"]["license"], drawn.pictures if drawn else ())
        replace(home / "README.md", readme.encode())
    lock["drawn"] = charts
    files = sorted(p for p in home.iterdir() if p.is_file() and p.name != artifact.LOCK and p.suffix != ".tmp")
    known = {n: d for n, d in lock.get("files", {}).items() if n.endswith(artifact.WRITTEN_ONCE)}  # written once
    lock["files"] = {p.name: known.get(p.name) or artifact.file_digest(p) for p in files}
    artifact.write_json(home / artifact.LOCK, lock)
    return document
