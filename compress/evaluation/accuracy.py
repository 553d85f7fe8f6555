"""Accuracy on lm-eval's tasks: their prompts and their scoring, our model behind them.

lm-eval renders the documents and turns log-likelihoods into metrics; the log-likelihoods come from `likelihood`
and any `Runtime`, or block by block from `blockwise`, so that every model is scored by the same code. Everything runs
in a worker process: importing lm-eval and its datasets costs more memory than compressing a model.

A task is looked for in three places: `eval/tasks/NAME/` (ours, its data beside it); where COMPRESS_DATA_DIR names
a folder, `eval/tasks/local/NAME.yaml` (the field's tasks, from that folder's files); lm-eval's own (from the hub).
A document is named by a hash of what a model is shown of it, so that the last two give the same names.

Left out: tasks that generate text; few-shot prompts; chat templates.
"""

import contextlib
import difflib
import hashlib
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lm_eval
import lm_eval.utils
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from compress.artifact import open_artifact
from compress.errors import CompressError, nearest
from compress.evaluation.blockwise import score_blockwise
from compress.evaluation.likelihood import WINDOW, Score, Tokens, score
from compress.evaluation.suite import BINARY
from compress.models.files import max_positions
from compress.models.load import hush
from compress.models.words import tokenizer
from compress.paths import cache_dir, data_dir
from compress.runtimes import RUNTIMES
from compress.tables import resolve
from compress.workers import serve, tell

_KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
_LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"


Scorer = Callable[[list[tuple[Tokens, Tokens]]], list[Score]]


class Scored(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Scores of (context, continuation) pairs and a tokenizer as a model of lm-eval.

    Attributes:
        asked: a hash of all tokens that were scored so far, in their order.
    """

    def __init__(self, scorer: Scorer, words: Any, positions: int | None) -> None:
        super().__init__()
        self.scorer, self.tokenizer = scorer, words
        self.max_length = min(WINDOW, positions or WINDOW)
        self.asked = hashlib.sha256()

    @property
    def begins(self) -> bool:
        """Whether the tokenizer puts a BOS in front of a text."""
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tok_encode("a")[:1] == [bos]

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token; 0 for a tokenizer that has none."""
        return int(self.tokenizer.eos_token_id or 0)

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of an empty context: the tokenizer's BOS, else its end token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them, and never a BOS before a BOS."""
        bos = self.tokenizer.bos_token or self.tokenizer.eos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **options)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = []
        for (_, said), context, continuation in requests:
            if not context or not continuation:
                raise CompressError(
                    f"the tokenizer makes no token of a question's answer {said!r}", where="the model's tokenizer",
                    hint="such a model cannot be asked these tasks: name another suite",
                )  # fmt: skip
            pairs.append(self._fitted(tuple(context), tuple(continuation)))
        return [(found.logprob, found.greedy) for found in self._score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Log-probability of whole texts, in windows that overlap by nothing but one token of context."""
        pairs, counts = [], []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = lm_eval.utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            cut = [lm_eval.utils.make_disjoint_window(window) for window in windows]
            pairs += [(tuple(context), tuple(continuation)) for context, continuation in cut]
            counts.append(len(cut))
        scores = iter(self._score(pairs))
        return [sum(next(scores).logprob for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Not offered: tasks that generate text are refused before."""
        raise AssertionError("a task that generates text")

    def _fitted(self, context: Tokens, continuation: Tokens) -> tuple[Tokens, Tokens]:
        """Cut on the left to what the model can see at once, as lm-eval does."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            return continuation[-self.max_length - 1 : -self.max_length], continuation[-self.max_length :]
        return context[-room:], continuation

    def _score(self, pairs: list[tuple[Tokens, Tokens]]) -> list[Score]:
        self.asked.update(json.dumps(pairs).encode())
        return self.scorer(pairs)


# --- tasks and documents ---


def load_tasks(names: Sequence[str]) -> dict[str, Any]:
    """lm-eval's task objects with their documents.

    Raises:
        CompressError: no such task, one that generates text, or documents that cannot be had.
    """
    return {name: _load_task(name) for name in names}


def _load_task(name: str) -> Any:
    folder, home = _place(name)
    manager = TaskManager(include_path=[str(p) for p in folder], include_defaults=False)
    if name not in manager.all_subtasks and not home:
        manager = TaskManager()
    if name not in manager.all_subtasks:
        hint = "`lm-eval ls tasks` lists them; a suite names tasks, not groups"
        what = f"unknown task {name!r}; {nearest(name, _known(manager, name))}"
        raise CompressError(what, where="the suite's tasks", hint=hint)
    with _data_errors(name), contextlib.chdir(home or Path.cwd()):  # data_files are relative to the working directory
        task = manager.load(name)["tasks"][name]
    if task.OUTPUT_TYPE not in _KINDS:
        what = f"task {name!r} generates text; only tasks scored by likelihood are run"
        raise CompressError(what, where="the suite's tasks", hint="leave it out of the suite")
    return task


def _known(manager: TaskManager, name: str) -> list[str]:
    """A few of thousands of names: our own, and those of lm-eval that are spelt most like it."""
    ours = [path.stem for path in (data_dir("eval") / "tasks").glob("*/*.yaml")]
    return [*ours, *difflib.get_close_matches(name, manager.all_subtasks, n=5)]


def _place(name: str) -> tuple[list[Path], Path | None]:
    """Folders in which the task's YAML is, and the folder of its data; None where it comes from the hub."""
    ours = data_dir("eval") / "tasks" / name
    if ours.is_dir():
        return [ours], ours
    local = data_dir("eval") / "tasks" / "local"
    data = os.environ.get("COMPRESS_DATA_DIR")
    if data and (local / f"{name}.yaml").is_file():
        return [local], Path(data).expanduser().resolve()
    # Indexing all of lm-eval takes seconds: look into the folders that are called like the task's beginning first.
    return [p for p in _LM_EVAL_TASKS.iterdir() if p.is_dir() and name.startswith(p.name)], None


@contextlib.contextmanager
def _data_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # what datasets and the hub's library raise are OSErrors
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CompressError(
            f"the documents of task {name!r} cannot be had: {first}",
            where="the suite's tasks",
            hint="connect to the hub, or set COMPRESS_DATA_DIR to a folder with the tasks' JSONL files",
        ) from error


def document_hash(task: Any, document: Any) -> str:
    """12 hex digits: of what a model is shown of a document, and what is right."""
    choices = task.doc_to_choice(document) if task.config.doc_to_choice is not None else None
    shown = [task.doc_to_text(document), task.doc_to_target(document), choices]
    return hashlib.sha256(json.dumps(shown, ensure_ascii=False).encode()).hexdigest()[:12]


def choose(task: Any, name: str, wanted: Sequence[str] | None) -> list[tuple[int, str]]:
    """Index and hash of the documents to be scored, in the data's order; what stands twice is scored once.

    Raises:
        CompressError: the data lacks a document of the sample.
    """
    places: dict[str, int] = {}
    for index, document in enumerate(task.eval_docs):
        places.setdefault(document_hash(task, document), index)
    absent = sorted(set(wanted or ()) - set(places))
    if absent:
        raise CompressError(
            f"{len(absent)} of the sample's documents of task {name!r} are not in the data, first {absent[0]}",
            where="the suite's sample",
            hint="use the data that the sample was drawn from, or the suite core-full",
        )
    kept = set(places if wanted is None else wanted)
    return [(index, h) for h, index in places.items() if h in kept]


# --- the worker ---


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The worker.

    Request: `tasks`. To find documents, {name: sample}, a list of hashes or null for all; the answer names the
    (index, hash) pairs, and the metrics that the task reports. To score, {name: pairs}, and `model` (a folder),
    `runtime` (of RUNTIMES, or "stream" for block by block in float32), `dtype`, `threads`.
    """
    with contextlib.redirect_stdout(sys.stderr):
        hush()
        tasks = load_tasks(list(request["tasks"]))
        if "model" in request:
            return _evaluate(request, tasks)
        return {
            name: {
                "documents": choose(task, name, request["tasks"][name]),
                "metrics": [metric["metric"] for metric in task.config.metric_list],
            }
            for name, task in tasks.items()
        }


def _evaluate(request: dict[str, Any], tasks: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["model"])
    config = json.loads((folder / "config.json").read_text())
    words = tokenizer(folder)
    if getattr(words, "backend_tokenizer", None) is not None:
        words.backend_tokenizer.no_truncation()  # saved tokenizers may cut; questions are cut by `Scored` alone
    model = Scored(_scorer(request), words, max_positions(config))
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks.values()),
        samples={name: [index for index, _ in pairs] for name, pairs in request["tasks"].items()},
        task_manager=TaskManager(include_defaults=False),  # else it indexes thousands of files that nobody asks for
        bootstrap_iters=0,
        log_samples=True,
    )
    about = {
        "backend": f"lm-eval {importlib.metadata.version('lm_eval')}", "bos": model.begins,
        "prompts": model.asked.hexdigest()[:16],
    }  # fmt: skip
    return {name: {**_task_result(task, request["tasks"][name], found), **about} for name, task in tasks.items()}


def _scorer(request: Mapping[str, Any]) -> Scorer:
    """What scores pairs by the model in the request's folder."""
    folder = Path(request["model"])
    if request["runtime"] == "stream":
        torch.set_num_threads(request["threads"])
        model = open_artifact(folder)
        return lambda pairs: score_blockwise(model, pairs, folder=cache_dir(), progress=tell)
    runtime = resolve(RUNTIMES, request["runtime"], kind="runtime")()
    runtime.load(folder, threads=request["threads"], dtype=request["dtype"], expand=True)
    return lambda pairs: score(runtime, pairs, vocab_size=runtime.vocab_size, progress=tell)


def _task_result(task: Any, pairs: list[tuple[int, str]], found: Mapping[str, Any]) -> dict[str, Any]:
    name = task.config.task
    samples = {sample["doc_id"]: sample for sample in found["samples"][name]}
    metrics = [m["metric"] for m in task.config.metric_list]
    documents = []
    for index, h in pairs:
        sample = samples[index]
        choices = task.doc_to_choice(sample["doc"]) if task.config.doc_to_choice is not None else None
        logprobs = [_logprob(response) for response in sample["filtered_resps"]]
        scored = {metric: sample[metric] for metric in metrics if metric in sample}
        if None in logprobs:  # else the first choice would be taken for the answer
            scored |= {metric: 0.0 for metric in BINARY if metric in scored}
        documents.append({"document": h, "choices": len(choices) if choices else None, "logprobs": logprobs, **scored})
    said = {metric: found["results"][name][f"{metric},none"] for metric in metrics}
    shares = {metric: fmean(float(d[metric]) for d in documents) for metric in BINARY if metric in said}
    return {"documents": documents, "metrics": {**said, **shares}, "version": str(task.VERSION)}


def _logprob(response: Any) -> float | None:
    """A log-likelihood; None where the model gives no number."""
    value = float(response[0] if isinstance(response, list | tuple) else response)
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    raise SystemExit(serve(answer))
