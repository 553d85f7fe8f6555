"""Where calibration tokens come from: a named text, cut into windows, seeded, hashed and counted.

A calibration set is two tensors of token windows: those that the methods see, and those that follow, which
nothing but the walk's own checks ever sees. What they are made from is settled before any work
(`resolve_dataset`, cheap, no tokenizer) and kept in the lock; making them (`load_windows`) is then a pure
function of the source, the seed and the tokenizer, and their hash proves it.

A plain text file is ONE document: tokenised whole, cut into consecutive windows. Everything else is MANY
documents, taken in a seeded order, joined and cut; the held-out windows come from documents that calibration
did not touch, as far as there are enough. Windows are always full: padding would pollute the statistics, so
too little text is an error. Left out: packing documents by length, masks, mixing sets, random offsets.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.calibration import embedded, files, hub_sets
from compress.calibration.tokens import text_ids, tokenised, untouched
from compress.errors import CompressError, nearest

embedded_text = embedded.embedded_text  # for whoever asks here, beside the windows
_TOKEN_BYTES = 16  # a token is hardly ever longer on average
_SELF_ROUNDS = 4  # times the model is asked for windows, while too many of them repeat each other


class Calibration(BaseModel):
    """The recipe's `calibration:` section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = "auto"
    samples: int = Field(default=128, ge=1, strict=True)
    seq_len: int = Field(default=512, ge=8, strict=True)
    seed: int = Field(default=0, ge=0, lt=1 << 32, strict=True)


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
        counts: `tokens`, `heldout_tokens`, `unique_windows` of both, `bos` among the first; `documents` that
            calibration read and `heldout_documents`, the further ones; `shared_documents`, 1 when there were
            too few (a text file is one) to hold whole ones out; `duplicate_windows`, `duplicate_documents`
            dropped; `untemplated_documents`, conversations written as plain text; `available_tokens`, those
            read (of many documents, only as far as needed).
    """

    tokens_NT: torch.Tensor
    heldout_NT: torch.Tensor
    sha256: str
    counts: dict[str, int]


def resolve_dataset(calibration: Calibration, *, online: Callable[[], bool] | None = None) -> ResolvedData:
    """Settle what the recipe's `dataset` is on this machine: seconds at most, no tokenizer, no download.

    `auto` is the hub's set where its file is in the hub's local cache or the hub answers a short probe,
    and the embedded text elsewhere. With HF_HUB_OFFLINE set nothing is asked. `online` replaces the probe.

    Raises:
        CompressError: an unknown name; a file that is missing, empty or unreadable; a hub set asked for by
            name that is neither cached nor reachable.
    """
    asked = dataset = calibration.dataset
    reason, content = "", None
    if asked.startswith("file:"):
        path = Path(asked.removeprefix("file:")).expanduser().absolute()
        dataset, content = f"file:{path}", files.read_bytes(path)
    elif asked == "auto":
        here, reason = hub_sets.obtainable(hub_sets.AUTO, online)
        dataset, reason = (hub_sets.AUTO, reason) if here else ("embedded", f"{reason}; embedded text used")
    elif asked in hub_sets.HUB_SETS:
        here, why = hub_sets.obtainable(asked, online)
        if not here:
            raise hub_sets.unreachable(asked, why)
    elif asked not in ("embedded", "self"):
        known = [*hub_sets.HUB_SETS, "auto", "self", "embedded", "file:PATH"]
        what = f"unknown dataset {asked!r}; {nearest(asked, known)}"
        raise CompressError(what, where=files.WHERE, hint=f"a file is written `dataset: file:{asked}`")
    if dataset == "embedded":
        content = embedded_text("calibration").encode()
    sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    return ResolvedData(dataset, asked, reason, sha256)


def load_windows(
    resolved: ResolvedData,
    calibration: Calibration,
    tokenizer: Any,
    *,
    heldout: int,
    generate: Callable[..., torch.Tensor] | None = None,
) -> Windows:
    """Calibration and held-out windows of the resolved set; the tokenizer is left as it was.

    A text file gives its windows in order, the first `samples` and the next `heldout`. Of many documents
    calibration takes from the front until it has its windows; held out are the next ones that repeat nothing
    calibration read, or, when those are too few, the windows that follow in the joined stream. For `self`,
    `generate(n_windows, seq_len, seed)` draws int64 [n_windows, seq_len] from the model itself.

    Raises:
        CompressError: too few tokens; a source that cannot be read, decoded or parsed; messages without a
            chat template; the hub lost on the way; `self` without `generate`.
    """
    assert heldout >= 0, heldout
    counts = Counter({"duplicate_documents": 0, "untemplated_documents": 0, "available_tokens": 0})
    if resolved.dataset == "self":
        ids = _generated(calibration, heldout, generate)
    else:
        plain = resolved.asked == "auto"  # nobody chose conversations, so a base model is not refused
        ids = tokenised(_documents(resolved.dataset, calibration.seed), tokenizer, counts, plain=plain)
    with untouched(tokenizer):
        windows, held = _cut(ids, calibration, heldout, counts)
    if len(windows) < calibration.samples or len(held) < heldout:
        raise _too_short(resolved, calibration, len(windows) + len(held), heldout, counts)
    tokens_NT = torch.stack(windows)
    heldout_NT = torch.stack(held) if held else tokens_NT[:0]
    digest = hashlib.sha256()
    for part_NT in (tokens_NT, heldout_NT):
        digest.update(json.dumps(list(part_NT.shape)).encode())
        digest.update(part_NT.numpy().astype("<i8").tobytes())
    bos = getattr(tokenizer, "bos_token_id", None)
    counts["tokens"], counts["heldout_tokens"] = tokens_NT.numel(), heldout_NT.numel()
    counts["unique_windows"] = len(windows) + len(held)
    counts["bos"] = 0 if bos is None else int((tokens_NT == bos).sum())
    return Windows(tokens_NT, heldout_NT, digest.hexdigest(), dict(counts))


def check_length(
    resolved: ResolvedData, calibration: Calibration, tokenizer: Any, *, heldout: int, vocabulary: int
) -> None:
    """Refuses a text that is too short, before any work and in a moment: one that is surely long enough is not read.

    Raises:
        CompressError: as `load_windows` and `check_vocabulary`.
    """
    need = (calibration.samples + heldout) * calibration.seq_len
    if resolved.dataset == "embedded":
        size = len(embedded_text("calibration"))
    elif resolved.dataset.startswith("file:"):
        size = Path(resolved.dataset.removeprefix("file:")).stat().st_size
    else:
        return
    if size <= _TOKEN_BYTES * need:
        windows = load_windows(resolved, calibration, tokenizer, heldout=heldout)
        check_vocabulary(windows.tokens_NT, vocabulary, str(tokenizer.name_or_path))


def evaluation_text(dataset: str, where: str) -> str:
    """The text of a suite: `embedded`, or `file:PATH`; `where` names the suite in errors.

    Raises:
        CompressError: it is neither, or the file cannot be read.
    """
    if dataset == "embedded":
        return embedded_text("evaluation")
    path = Path(dataset.removeprefix("file:")).expanduser()
    if not dataset.startswith("file:") or not path.is_file():
        raise CompressError(
            f"the suite's text {dataset!r} is neither `embedded` nor `file:PATH` of a file",
            where=where,
            hint="correct the path in the suite; it is taken from the folder where the command is given",
        )
    return files.read_text(path)


def check_positions(seq_len: int, positions: int, where: str) -> None:
    """Refuses a suite's windows that are longer than the model's `positions` (0: the config does not say).

    Raises:
        CompressError: they are.
    """
    if 0 < positions < seq_len:
        raise CompressError(
            f"the suite's seq_len {seq_len} is longer than the model's {positions} positions",
            where=where,
            hint=f"choose a suite with windows of {positions} tokens or fewer",
        )


def check_evaluation(dataset: str, tokenizer: Any, *, windows: int, seq_len: int, where: str) -> None:
    """Refuses a suite's text that is not there, or is seen to be too short; `tokenizer` is None where none is here.

    Raises:
        CompressError: as `evaluation_text` and `evaluation_windows`.
    """
    text = evaluation_text(dataset, where)
    if tokenizer is not None and len(text) <= _TOKEN_BYTES * windows * seq_len:
        evaluation_windows(tokenizer, text, windows=windows, seq_len=seq_len, where=where)


def check_vocabulary(tokens_NT: torch.Tensor, vocabulary: int, where: str) -> None:
    """Refuses tokens that the model has no embedding for.

    Raises:
        CompressError: the tokenizer is another model's.
    """
    largest = int(tokens_NT.max()) if tokens_NT.numel() else 0
    if largest >= vocabulary:
        raise CompressError(
            f"the tokenizer gives token {largest}, and the model's vocabulary has {vocabulary}: it is another model's",
            where=where,
            hint="put the tokenizer that belongs to the model into its folder",
        )


def evaluation_windows(
    tokenizer: Any, text: str, *, windows: int, seq_len: int, where: str = "the suite's text"
) -> torch.Tensor:
    """The first `windows` consecutive windows of `text`, tokenised whole: int64 [windows, seq_len].

    Raises:
        CompressError: the text is too short.
    """
    with untouched(tokenizer):
        ids = text_ids(tokenizer, text)
    need = windows * seq_len
    if len(ids) < need:
        raise CompressError(
            f"the suite's text has {len(ids):,} tokens; {windows} windows of {seq_len} need {need:,}",
            where=where,
            hint=f"ask for at most {len(ids) // seq_len} windows, or for shorter ones",
        )
    return torch.tensor(ids[:need], dtype=torch.int64).reshape(windows, seq_len)


def _documents(dataset: str, seed: int) -> Iterable[files.Document]:
    """The documents of a source, in their order."""
    if dataset.startswith("file:"):
        return files.file_documents(Path(dataset.removeprefix("file:")), seed)
    return embedded.embedded_documents(seed) if dataset == "embedded" else hub_sets.hub_documents(dataset, seed)


def _generated(
    calibration: Calibration, heldout: int, generate: Callable[..., torch.Tensor] | None
) -> Iterator[tuple[str, list[int]]]:
    """Windows that the model itself draws; each is a document of its own."""
    if generate is None:
        what = "dataset 'self' draws its windows from the model, and nothing here can run the model"
        raise CompressError(what, where=files.WHERE, hint=f"use another dataset: {hub_sets.ELSEWHERE}")
    for seed in range(calibration.seed, calibration.seed + _SELF_ROUNDS):
        drawn_NT = generate(calibration.samples + heldout, calibration.seq_len, seed)
        for number, ids in enumerate(drawn_NT.tolist()):
            yield f"{seed}/{number}", ids


@dataclass
class _Cutter:
    """Joins token lists and cuts the stream into `limit` full windows, none of them twice or `known`."""

    seq_len: int
    limit: int
    known: Collection[bytes] = ()
    windows: dict[bytes, torch.Tensor] = field(default_factory=dict)
    duplicates: int = 0
    documents: int = 0
    _tail: list[int] = field(default_factory=list)

    def add(self, ids: list[int]) -> None:
        self.documents += 1
        stream = torch.tensor(self._tail + ids, dtype=torch.int64)
        whole = len(stream) // self.seq_len * self.seq_len
        for window in stream[:whole].reshape(-1, self.seq_len):
            if len(self.windows) == self.limit:
                break
            digest = hashlib.sha256(window.numpy().tobytes()).digest()
            if digest in self.windows or digest in self.known:
                self.duplicates += 1
            else:
                self.windows[digest] = window
        self._tail = stream[whole:].tolist()


def _cut(
    documents: Iterator[tuple[str, list[int]]], calibration: Calibration, heldout: int, counts: Counter[str]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Windows from the front, and held-out ones from documents of groups that calibration did not read."""
    samples = calibration.samples
    main = _Cutter(calibration.seq_len, samples + heldout)
    held = _Cutter(calibration.seq_len, heldout, known=main.windows)
    read, rest = set(), []
    for group, ids in documents:
        counts["available_tokens"] += len(ids)
        if len(main.windows) < samples:
            read.add(group)
            main.add(ids)
        else:
            rest.append(ids)
            if group not in read:
                held.add(ids)
        if len(main.windows) >= samples and len(held.windows) >= heldout:
            break
    counts["documents"] = main.documents
    shared = len(held.windows) < heldout
    if shared:
        for ids in rest:
            if len(main.windows) < samples + heldout:
                main.add(ids)
    windows = list(main.windows.values())
    following = windows[samples:] if shared else list(held.windows.values())
    counts["shared_documents"] = int(shared)
    counts["heldout_documents"] = main.documents - counts["documents"] if shared else held.documents
    counts["duplicate_windows"] = main.duplicates if shared else main.duplicates + held.duplicates
    return windows[:samples], following


def _too_short(
    resolved: ResolvedData, calibration: Calibration, have: int, heldout: int, counts: Counter[str]
) -> CompressError:
    """Never silently fewer windows: how many tokens there are, how many are needed, what to do."""
    samples, seq_len, tokens = calibration.samples, calibration.seq_len, counts["available_tokens"]
    fewer = f"`samples: {have - heldout}` or less, " if have > heldout else ""
    dropped = counts["duplicate_windows"]
    repeated = f" ({dropped} repeated ones dropped)" if dropped else ""
    shorter = tokens // (samples + heldout)
    seq = f"`seq_len: {shorter}` or less" if 8 <= shorter < seq_len else "a shorter seq_len"
    return CompressError(
        f"dataset {resolved.dataset!r} is too short: {tokens:,} tokens, {have} windows of {seq_len}{repeated}; "
        f"{samples} samples and {heldout} held-out windows need {(samples + heldout) * seq_len:,} tokens",
        where="calibration",
        hint=f"{fewer}{seq}, or another dataset",
    )
