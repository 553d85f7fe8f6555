"""Public data sets: one file of each, at one revision, is more than any calibration needs.

Read from the hub's local cache of files where it is there, else streamed from the hub.
"""

import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.calibration.files import WHERE, Document, as_document
from compress.errors import CompressError
from compress.models import hub_files

AUTO = "ultrachat"  # what `auto` is where the hub can be had
BLOCK = 256  # documents of a streamed set that are put in seeded order together
ELSEWHERE = "`dataset: embedded` needs no network; `dataset: file:PATH` reads a file of yours"
_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class HubSet:
    repo: str
    revision: str
    file: str
    articles: bool = False  # rows are lines; a heading begins a new document

    def cached(self) -> Path | None:
        """The file in the hub's local cache."""
        return hub_files.cached_file(self.repo, self.file, self.revision, repo_type="dataset")

    def answers(self) -> bool:
        """Whether the hub has the file, asked for a few seconds at most."""
        return hub_files.probe(self.repo, self.file, self.revision, repo_type="dataset") is None


HUB_SETS = {
    "ultrachat": HubSet(
        "HuggingFaceH4/ultrachat_200k",
        "8049631c405ae6576f93f445c6b8166f76f5505a",
        "data/train_sft-00000-of-00003-a3ecf92756993583.parquet",
    ),
    "wikitext2": HubSet(
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "wikitext-2-raw-v1/train-00000-of-00001.parquet",
        articles=True,
    ),
    "c4": HubSet(
        "allenai/c4",
        "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        "en/c4-train.00000-of-01024.json.gz",
    ),
    "pile": HubSet(
        "NeelNanda/pile-10k",
        "127bfedcd5047750df5ccf3a12979a47bfa0bafa",
        "data/train-00000-of-00001-4746b8785c874cc7.parquet",
    ),
}


def obtainable(alias: str, online: Callable[[], bool] | None) -> tuple[bool, str]:
    """Whether the set can be had, and why; `online` replaces the probe of the hub."""
    hub_set = HUB_SETS[alias]
    if hub_set.cached() is not None:
        return True, "found in the hub's local cache"
    for switch in _SWITCHES:
        if os.environ.get(switch, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return False, f"{switch} is set and the set is not cached"
    here = online() if online else hub_set.answers()
    return here, "hub reachable" if here else "hub not reachable"


def unreachable(alias: str, why: str) -> CompressError:
    """The refusal of a set that was asked for by name."""
    what = f"dataset {alias!r} ({HUB_SETS[alias].repo}) cannot be had: {why}"
    return CompressError(what, where=WHERE, hint=ELSEWHERE)


def hub_documents(alias: str, seed: int) -> Iterator[Document]:
    """A set's documents, streamed; each block of `BLOCK` in an order of its own, drawn from the seed."""
    hub_set, rng, rows = HUB_SETS[alias], random.Random(seed), _rows(alias)
    if hub_set.articles:
        rows = ({"text": article} for article in _articles(row["text"] for row in rows))
    numbered = enumerate(rows)
    while block := list(itertools.islice(numbered, BLOCK)):
        rng.shuffle(block)
        for number, row in block:
            yield as_document(row, f"{hub_set.repo}, document {number}")


def _rows(alias: str) -> Iterator[dict[str, Any]]:
    """The rows of the set's file, from the hub's cache or read from the hub piece by piece."""
    import datasets

    hub_set = HUB_SETS[alias]
    # the file itself and not the repository: no card is asked for, and no retries when the hub is away
    source = str(hub_set.cached() or f"hf://datasets/{hub_set.repo}@{hub_set.revision}/{hub_set.file}")
    builder = "parquet" if hub_set.file.endswith(".parquet") else "json"
    try:
        yield from datasets.load_dataset(builder, data_files={"train": source}, split="train", streaming=True)
    except (datasets.exceptions.DatasetsError, *hub_files.failures()) as error:
        raise unreachable(alias, f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """Wikitext's rows are lines; a line ` = Title = ` begins an article."""
    article: list[str] = []
    for line in lines:
        if article and re.fullmatch(r" = [^=].* = \n?", line) and "".join(article).strip():
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
