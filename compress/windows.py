"""A job's tokens: calibration and held-out windows, and the suite's; all read before any work begins."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from compress import artifact
from compress.calibration.data import (
    Windows,
    check_positions,
    check_vocabulary,
    evaluation_text,
    evaluation_windows,
    load_windows,
)
from compress.evaluation import report
from compress.evaluation.suite import Suite
from compress.files import replace
from compress.job import Job, weights_folder
from compress.models.files import max_positions
from compress.models.words import tokenizer
from compress.runtimes.draw import draw


def tokens_of(job: Job, folder: Path, key: str, evaluate: bool) -> tuple[Windows | None, torch.Tensor | None]:
    """What the walk needs, None when it is done; the suite's windows [N, T], None without evaluation."""
    words = job.words or tokenizer(weights_folder(job.source))
    tokens_NT = suite_tokens(job.suite, words, job.source.config, str(job.source.path)) if evaluate else None
    windows = None
    if not is_done(folder, key):
        with job.recipe.located():
            windows = _windows(job, words, folder, key)
        for tokens in (windows.tokens_NT, windows.heldout_NT):
            check_vocabulary(tokens, int(job.source.config["vocab_size"]), str(job.source.path))
    return windows, tokens_NT


def is_done(folder: Path, key: str) -> bool:
    """Whether the artifact of a key is there with a report that can be read."""
    return artifact.is_done(folder, key) and report.stands(folder)


def suite_tokens(suite: Suite, words: Any, config: Mapping[str, Any], model: str) -> torch.Tensor:
    """The suite's windows [N, T], read before any work so that what is wrong with them is said then.

    Args:
        words: the model's tokenizer.
        config: the model's config.json.
        model: the model's place, for errors.
    """
    wanted, where = suite.text, f"suite {suite.name}, `text`"
    check_positions(wanted.seq_len, max_positions(config), where)
    text = evaluation_text(wanted.dataset, where)
    tokens_NT = evaluation_windows(words, text, windows=wanted.windows, seq_len=wanted.seq_len, where=where)
    if isinstance(config.get("vocab_size"), int):
        check_vocabulary(tokens_NT, config["vocab_size"], model)
    return tokens_NT


def _windows(job: Job, words: Any, folder: Path, key: str) -> Windows:
    """Calibration and held-out tokens: those of the interrupted run of this key, else made now."""
    kept = folder / artifact.STATE / "windows.safetensors"
    if artifact.holds_state(folder, key) and kept.is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, SafetensorError):  # damaged: the same are made again
            tensors, about = load_file(kept), json.loads((kept.with_suffix(".json")).read_text())
            return Windows(tensors["tokens"], tensors["heldout"], about["sha256"], about["counts"])
    settings = job.recipe.recipe.calibration
    first = next((t for t in (words.bos_token_id, words.eos_token_id) if t is not None), 0)

    def generate(windows: int, seq_len: int, seed: int) -> torch.Tensor:
        return draw(weights_folder(job.source).resolve(), first, windows, seq_len, seed, torch.get_num_threads())

    heldout = job.plan.calibration["heldout"] // settings.seq_len
    if job.plan.statistics == "none":
        settings = settings.model_copy(update={"samples": 1})
    return load_windows(job.data, settings, words, heldout=heldout, generate=generate)


def keep_windows(windows: Windows, folder: Path) -> None:
    """Keeps the tokens beside the state: text drawn from a model is not drawn twice."""
    path = folder / artifact.STATE / "windows.safetensors"
    replace(path, save({"tokens": windows.tokens_NT, "heldout": windows.heldout_NT}))
    about = {"sha256": windows.sha256, "counts": windows.counts}
    replace(path.with_suffix(".json"), json.dumps(about).encode())
