"""The embedded text, for machines without a network: the language reference inside every Python.

Some 113,000 tokens of English with code: narrow, good enough to calibrate and to smoke-test. It differs
between Python versions, so its hash is recorded.

Its topics repeat each other. Those that do make one group (a paragraph of 60 characters or more in common,
blanks aside, or one topic verbatim inside another); groups are drawn in a fixed order into the evaluation
part while they fit into its share, and the others are for calibration. So no paragraph is on both sides.
"""

import itertools
import random
import re
from collections import Counter
from functools import cache
from typing import Literal

from compress.calibration.files import WHERE, Document
from compress.errors import CompressError

EVALUATION_SHARE = 0.23  # of the characters, at most
SHARED_PARAGRAPH = 60  # characters from which a paragraph found in two topics makes them repeats


def embedded_text(part: Literal["calibration", "evaluation"]) -> str:
    """One of the two parts, cleaned of nothing; refused where this Python was installed without it."""
    return "\n\n".join(str(topic.content) for topic in _parts()[part])


def embedded_documents(seed: int) -> list[Document]:
    """The topics of the calibration part in the seed's order."""
    documents = list(_parts()["calibration"])
    random.Random(seed).shuffle(documents)
    return documents


@cache
def _parts() -> dict[str, list[Document]]:
    """The topics of both parts, sorted."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        what = "this Python was installed without its documentation (pydoc_data), the embedded text"
        hint = "install the full standard library, or use `dataset: file:PATH`"
        raise CompressError(what, where=WHERE, hint=hint) from error
    groups = _groups(topics)
    sizes: Counter[str] = Counter()
    for name, group in groups.items():
        sizes[group] += len(topics[name])
    drawn, evaluation, room = sorted(sizes), set(), EVALUATION_SHARE * sizes.total()
    random.Random(0).shuffle(drawn)
    for group in drawn:
        if sizes[group] <= room:
            evaluation.add(group)
            room -= sizes[group]
    parts: dict[str, list[Document]] = {"calibration": [], "evaluation": []}
    for name, group in groups.items():
        part = parts["evaluation" if group in evaluation else "calibration"]
        part.append(Document(topics[name], group, f"embedded, topic {name}"))
    return parts


def _groups(topics: dict[str, str]) -> dict[str, str]:
    """Each topic's group, named by its first topic; topics in sorted order."""
    group = {name: name for name in sorted(topics)}
    paragraphs = {name: long_paragraphs(topics[name]) for name in group}
    for a, b in itertools.combinations(group, 2):
        inside = topics[a].strip() in topics[b] or topics[b].strip() in topics[a]
        if inside or paragraphs[a] & paragraphs[b]:
            keep, leave = sorted((group[a], group[b]))
            group.update({name: keep for name, its in group.items() if its == leave})
    return group


def long_paragraphs(text: str) -> set[str]:
    """The paragraphs that make two texts repeats of each other, blanks aside."""
    found = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return {paragraph for paragraph in found if len(paragraph) >= SHARED_PARAGRAPH}
