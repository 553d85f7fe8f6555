"""Where calibration tokens come from: a named text, cut into windows, seeded, hashed and counted.

The idea. A calibration set is two tensors of token windows: those that the methods see, and those that
follow, which nothing but the walk's own checks ever sees. What they were made from is settled before
any work (`resolve_dataset`, cheap, no tokenizer) and kept in the lock; making them (`load_windows`) is
then a pure function of the source, the seed and the tokenizer, and their hash proves it.

A plain text file is ONE document: tokenised whole, cut into consecutive windows. Everything else is MANY
documents, taken in a seeded order, joined and cut; the held-out windows come from documents that calibration
did not touch, as far as there are enough. Windows are always full: padding would pollute the statistics, so
too little text is an error, never fewer or padded windows. Repeated windows and documents are dropped.

Left out: packing documents by length, masks, mixing sets, remote code, files inside archives. Windows at
random offsets, as GPTQ's authors take them, would give no more variety than whole documents do, and could
not hold documents out.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.calibration import files, hub_sets
from compress.calibration.embedded import embedded_documents, embedded_text
from compress.calibration.tokens import text_ids, tokenised, untouched
from compress.errors import CompressError, nearest

__all__ = [
    "Calibration",
    "ResolvedData",
    "Windows",
    "embedded_text",
    "evaluation_windows",
    "load_windows",
    "resolve_dataset",
]

_SELF_ROUNDS = 4  # times the model is asked for windows, while too many of them repeat each other


class Calibration(BaseModel):
    """The recipe's `calibration:` section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = "auto"
    samples: int = Field(default=128, ge=1)
    seq_len: int = Field(default=512, ge=8)
    seed: int = 0


@dataclass(frozen=True)
class ResolvedData:
    """What a recipe's `dataset` means on this machine.

    Attributes:
        dataset: an alias, "embedded", "self" or "file:/absolute/path"; never "auto".
        asked: what the recipe said.
        reason: why `auto` became what it did; empty when there was no choice.
        sha256: of the file's bytes or of the embedded text; None where the content is not known yet.
    """

    dataset: str
    asked: str
    reason: str
    sha256: str | None


@dataclass(frozen=True)
class Windows:
    """Token windows, ready for the walk.

    Attributes:
        tokens_NT: int64 [samples, seq_len], the calibration windows.
        heldout_NT: int64 [heldout, seq_len], windows that calibration never saw.
        sha256: of both tensors' shapes and bytes.
        counts: `tokens`, `heldout_tokens`; `bos`, begin-of-sequence tokens among the calibration tokens;
            `unique_windows` kept (all of them) and `duplicate_windows` dropped; `documents` that
            calibration read and `heldout_documents`, the further ones; `duplicate_documents` dropped;
            `shared_documents`, 1 when there were too few documents to hold whole ones out (a text file
            is one document), so that both parts may share one, else 0; `untemplated_documents`,
            conversations written as plain text; `available_tokens`, the tokens read (of a source that
            is streamed, only as far as needed).
    """

    tokens_NT: torch.Tensor
    heldout_NT: torch.Tensor
    sha256: str
    counts: dict[str, int]


def resolve_dataset(calibration: Calibration, *, online: Callable[[], bool] | None = None) -> ResolvedData:
    """Settle what the recipe's `dataset` is on this machine: seconds at most, no tokenizer, no download.

    `auto` is the hub's set where its file is in the hub's local cache or the hub answers a short probe,
    and the embedded text elsewhere. With HF_HUB_OFFLINE set nothing is asked.

    Args:
        calibration: the recipe's section.
        online: replaces the probe of the hub.

    Raises:
        CompressError: an unknown name; a file that is missing, a directory, empty or unreadable; a hub
            set asked for by name that is neither cached nor reachable.
    """
    asked = calibration.dataset
    if asked.startswith("file:"):
        path = files.existing_file(asked)
        return ResolvedData(f"file:{path}", asked, "", files.file_sha256(path))
    dataset, reason = asked, ""
    if asked == "auto":
        here, reason = hub_sets.obtainable(hub_sets.AUTO, online)
        dataset = hub_sets.AUTO if here else "embedded"
        reason += "" if here else "; embedded text used"
    elif asked in hub_sets.HUB_SETS:
        here, why = hub_sets.obtainable(asked, online)
        if not here:
            raise hub_sets.unreachable(asked, why)
    elif asked not in ("embedded", "self"):
        hint = f"write `dataset: file:{asked}` for a file" if "/" in asked or "." in asked else None
        known = [*hub_sets.HUB_SETS, "auto", "self", "embedded", "file:PATH"]
        raise CompressError(
            f"unknown dataset {asked!r}; {nearest(asked, known)}", where=files.WHERE, hint=hint
        )
    text = embedded_text("calibration") if dataset == "embedded" else None
    return ResolvedData(dataset, asked, reason, hashlib.sha256(text.encode()).hexdigest() if text else None)


def load_windows(
    resolved: ResolvedData,
    calibration: Calibration,
    tokenizer: Any,
    *,
    heldout: int,
    generate: Callable[..., torch.Tensor] | None = None,
) -> Windows:
    """Calibration and held-out windows of the resolved set.

    A text file gives its windows in order, the first `samples` and the next `heldout`; the seed plays no
    part. Of many documents, in an order drawn from the seed, calibration takes from the front until it has
    its windows; held out are the next ones that repeat nothing calibration read. When those are too few,
    the held-out windows are the ones that follow in the joined stream, and `counts["shared_documents"]`
    says 1. The tokenizer is left as it was.

    Args:
        resolved: from `resolve_dataset`.
        calibration: the recipe's section.
        tokenizer: a tokenizer as transformers' auto class loads it.
        heldout: how many windows to hold out, 0 or more.
        generate: `generate(n_windows, seq_len, seed)` draws int64 [n_windows, seq_len] from the model
            itself; needed by `self` only.

    Raises:
        CompressError: too few tokens; a file that cannot be read, decoded or parsed; neither a text nor a
            messages column; messages without a chat template; the hub lost on the way; `self`
            without `generate`.
    """
    assert heldout >= 0, heldout
    samples, seq_len = calibration.samples, calibration.seq_len
    counts: Counter[str] = Counter(dict.fromkeys(("duplicate_documents", "untemplated_documents"), 0))
    with untouched(tokenizer):
        if resolved.dataset == "self":
            documents = _generated(calibration, heldout, generate)
        else:
            documents = _documents(resolved, calibration.seed, tokenizer, counts)
        windows, held = _cut(documents, seq_len, samples, heldout, counts)
    if len(windows) < samples or len(held) < heldout:
        raise _too_short(resolved, calibration, len(windows) + len(held), heldout, counts)
    tokens_NT, heldout_NT = (
        torch.stack(part) if part else torch.empty(0, seq_len, dtype=torch.int64) for part in (windows, held)
    )
    digest = hashlib.sha256()
    for part_NT in (tokens_NT, heldout_NT):
        digest.update(json.dumps(list(part_NT.shape)).encode())
        digest.update(part_NT.numpy().astype("<i8").tobytes())
    bos = getattr(tokenizer, "bos_token_id", None)
    counts["tokens"], counts["heldout_tokens"] = tokens_NT.numel(), heldout_NT.numel()
    counts["bos"] = 0 if bos is None else int((tokens_NT == bos).sum())
    counts["unique_windows"] = samples + heldout
    return Windows(tokens_NT, heldout_NT, digest.hexdigest(), dict(counts))


def evaluation_windows(tokenizer: Any, text: str, *, windows: int, seq_len: int) -> torch.Tensor:
    """The first `windows` consecutive windows of `text`, tokenised whole: int64 [windows, seq_len].

    Raises:
        CompressError: the text is too short.
    """
    with untouched(tokenizer):
        ids = text_ids(tokenizer, text)
    need = windows * seq_len
    if len(ids) < need:
        raise CompressError(
            f"the text has {len(ids):,} tokens; {windows} windows of {seq_len} need {need:,}",
            hint=f"ask for at most {len(ids) // seq_len} windows, or for shorter ones",
        )
    return torch.tensor(ids[:need], dtype=torch.int64).reshape(windows, seq_len)


def _documents(
    resolved: ResolvedData, seed: int, tokenizer: Any, counts: Counter[str]
) -> Iterator[tuple[str, list[int]]]:
    """(group, ids) of the source's documents in their order."""
    dataset = resolved.dataset
    path = Path(dataset.removeprefix("file:"))
    if dataset.startswith("file:") and files.is_text(path):
        return iter([(dataset, text_ids(tokenizer, files.read_text(path)))])
    if dataset.startswith("file:"):
        documents = files.file_documents(path, seed)
    elif dataset == "embedded":
        documents = embedded_documents(seed)
    else:
        documents = hub_sets.hub_documents(dataset, seed)
    plain = resolved.asked == "auto"  # nobody chose conversations, so a base model is not refused
    return tokenised(documents, tokenizer, counts, plain=plain)


def _generated(
    calibration: Calibration, heldout: int, generate: Callable[..., torch.Tensor] | None
) -> Iterator[tuple[str, list[int]]]:
    """Windows that the model itself draws; each is a document of its own."""
    if generate is None:
        raise CompressError(
            "dataset 'self' draws its windows from the model, and nothing here can run the model",
            where=files.WHERE,
            hint=f"use another dataset: {hub_sets.ELSEWHERE}",
        )
    shape = (calibration.samples + heldout, calibration.seq_len)
    for again in range(_SELF_ROUNDS):
        drawn_NT = generate(*shape, calibration.seed + again)
        assert tuple(drawn_NT.shape) == shape, (tuple(drawn_NT.shape), shape)
        for number, ids in enumerate(drawn_NT.tolist()):
            yield f"{again}/{number}", ids


@dataclass
class _Cutter:
    """Joins token lists and cuts the stream into full windows, dropping those met before.

    `limit` bounds the windows kept; tokens after the last one are not looked at.
    """

    seq_len: int
    limit: int
    known: frozenset[bytes] = frozenset()
    windows: dict[bytes, torch.Tensor] = field(default_factory=dict)
    duplicates: int = 0
    documents: int = 0
    _tail: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int]) -> None:
        if self.full:
            return
        self.documents += 1
        stream = torch.tensor([*self._tail, *ids], dtype=torch.int64)
        whole = len(stream) // self.seq_len * self.seq_len
        for window in stream[:whole].reshape(-1, self.seq_len):
            if self.full:
                return
            digest = hashlib.sha256(window.numpy().tobytes()).digest()
            if digest in self.windows or digest in self.known:
                self.duplicates += 1
            else:
                self.windows[digest] = window
        self._tail = stream[whole:].tolist()

    @property
    def full(self) -> bool:
        return len(self.windows) >= self.limit


def _cut(
    documents: Iterator[tuple[str, list[int]]], seq_len: int, samples: int, heldout: int, counts: Counter[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Windows of int64 [seq_len] from the front, and held-out ones from documents of other groups."""
    main = _Cutter(seq_len, samples + heldout)
    read: set[str] = set()
    while len(main.windows) < samples and (item := next(documents, None)):
        group, ids = item
        read.add(group)
        main.add(ids)
        counts["available_tokens"] += len(ids)
    counts["documents"] = main.documents
    held = _Cutter(seq_len, heldout, known=frozenset(itertools.islice(main.windows, samples)))
    rest: list[list[int]] = []
    while not held.full and (item := next(documents, None)):
        group, ids = item
        rest.append(ids)
        if group not in read:
            held.add(ids)
        counts["available_tokens"] += len(ids)
    windows = list(main.windows.values())
    if held.full:
        counts["heldout_documents"], counts["shared_documents"] = held.documents, 0
        counts["duplicate_windows"] = main.duplicates + held.duplicates
        return windows[:samples], list(held.windows.values())
    for ids in rest:
        main.add(ids)
    windows = list(main.windows.values())
    counts["heldout_documents"], counts["shared_documents"] = main.documents - counts["documents"], 1
    counts["duplicate_windows"] = main.duplicates
    return windows[:samples], windows[samples:]


def _too_short(
    resolved: ResolvedData, calibration: Calibration, have: int, heldout: int, counts: Counter[str]
) -> CompressError:
    """Never silently fewer windows: how many tokens there are, how many are needed, what to do."""
    samples, seq_len = calibration.samples, calibration.seq_len
    dropped = f", {counts['duplicate_windows']} repeated ones dropped" if counts["duplicate_windows"] else ""
    fewer = f"`samples: {have - heldout}` or less" if have > heldout else "fewer samples"
    shorter = counts["available_tokens"] // (samples + heldout)
    seq = f"`seq_len: {shorter}` or less" if 8 <= shorter < seq_len else "a shorter seq_len"
    return CompressError(
        f"dataset {resolved.dataset!r} is too short: {counts['available_tokens']:,} tokens, "
        f"{have} windows of {seq_len}{dropped}; {samples} samples and {heldout} held-out windows need "
        f"{(samples + heldout) * seq_len:,} tokens",
        where="calibration",
        hint=f"{fewer}, {seq}, or another dataset",
    )
