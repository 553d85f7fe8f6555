"""The embedded text, for machines without a network: the language reference inside every Python.

Some 113,000 tokens of English with code: narrow, good enough to calibrate and to smoke-test. It differs
between Python versions, so its hash is recorded.

Its topics repeat each other. Those that do make one group (a paragraph of 60 characters or more in common,
blanks aside, or one topic verbatim inside another); groups are drawn in a fixed order into the evaluation
part while they fit into its share, and the others are for calibration. So no paragraph is on both sides.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Literal

from compress.calibration.files import WHERE, Document, shuffled
from compress.errors import CompressError

EVALUATION_SHARE = 0.23  # of the characters, at most
SHARED_PARAGRAPH = 60  # characters from which a paragraph found in two topics makes them repeats


def embedded_text(part: Literal["calibration", "evaluation"]) -> str:
    """One of the two parts, cleaned of nothing.

    Raises:
        CompressError: this Python was installed without `pydoc_data`.
    """
    return "\n\n".join(text for _, text in _parts()[part])


def embedded_documents(seed: int) -> Iterator[Document]:
    """The topics of the calibration part in the seed's order."""
    topics = _parts()["calibration"]
    for index in shuffled(len(topics), seed):
        group, text = topics[index]
        yield Document(text, group, f"embedded, topic {index}")


@cache
def _parts() -> dict[str, list[tuple[str, str]]]:
    """(group, text) of every topic, by part, in the topics' order."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CompressError(
            "this Python was installed without its documentation (pydoc_data), the embedded text",
            where=WHERE,
            hint="install the full standard library, or use `dataset: file:PATH`",
        ) from error
    groups = _groups(topics)
    sizes: Counter[str] = Counter()
    for name, group in groups.items():
        sizes[group] += len(topics[name])
    room = EVALUATION_SHARE * sizes.total()
    names = sorted(sizes)
    evaluation: set[str] = set()
    for group in (names[index] for index in shuffled(len(names), 0)):
        if sizes[group] <= room:
            evaluation.add(group)
            room -= sizes[group]
    parts: dict[str, list[tuple[str, str]]] = {"calibration": [], "evaluation": []}
    for name, group in groups.items():
        parts["evaluation" if group in evaluation else "calibration"].append((group, topics[name]))
    return parts


def _groups(topics: dict[str, str]) -> dict[str, str]:
    """Each topic's group, named by its first topic; topics in sorted order."""
    group = {name: name for name in sorted(topics)}

    def join(a: str, b: str) -> None:
        keep, leave = sorted((group[a], group[b]))
        group.update({name: keep for name, its in group.items() if its == leave})

    owner: dict[str, str] = {}
    for name in group:
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            words = " ".join(paragraph.split())
            if len(words) >= SHARED_PARAGRAPH:
                join(name, owner.setdefault(words, name))
    for inner, outer in itertools.permutations(group, 2):
        if group[inner] != group[outer] and topics[inner].strip() in topics[outer]:
            join(inner, outer)
    return group
