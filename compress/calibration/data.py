"""Where calibration tokens come from: a named text, cut into windows, seeded, hashed and counted.

The idea. A calibration set is two tensors of token windows: those that the methods see, and those that
follow, which nothing but the walk's own checks ever sees. What they were made from is settled before
any work (`resolve_dataset`, cheap, no tokenizer) and kept in the lock; making them (`load_windows`) is
then a pure function of the source, the seed and the tokenizer, and their hash proves it.

Two kinds of source. A plain text file is ONE document: tokenised whole, cut into consecutive windows.
Everything else is MANY documents: taken in a seeded order, each with the tokenizer's own special tokens,
joined and cut; the held-out windows come from documents that calibration did not touch, as far as there
are enough. Windows are always full: padding would pollute the statistics, so too little text is an
error, never fewer or padded windows. Repeated windows and repeated documents are dropped and counted.

`embedded` is for machines without a network: the language reference that ships inside every Python, some
113,000 tokens of English with code. It is narrow text, good enough to calibrate and to smoke-test, and it
differs between Python versions, so its hash is recorded.

Left out: packing documents by length, masks, mixing sets, remote code, files inside archives, and the
`datasets` library's own Arrow cache (only the hub's cache of files is looked at). The many-document
sources could sample windows at random offsets as GPTQ's authors do; taking whole documents gives the same
variety and lets the held-out part be disjoint by document.
"""

import hashlib
import itertools
import json
import os
import random
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.errors import CompressError, nearest

PROBE_SECONDS = 3.0
HUB_BLOCK = 256  # documents of a streamed set that are put in seeded order together
EVALUATION_SHARE = 0.23  # of the embedded text's characters, at most
SHARED_PARAGRAPH = 60  # characters from which a paragraph found in two topics makes them repeats
SELF_ROUNDS = 4  # times the model is asked again for windows in place of repeated ones


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
            calibration read and `heldout_documents`; `duplicate_documents` dropped;
            `shared_documents`, 1 when there were too few documents to hold whole ones out, so that both
            parts may share a document, else 0 (a text file is one document and always shares it);
            `untemplated_documents`, conversations written as plain text; `available_tokens`, the tokens
            read (of a source that is streamed, only as far as needed).
    """

    tokens_NT: torch.Tensor
    heldout_NT: torch.Tensor
    sha256: str
    counts: dict[str, int]


@dataclass(frozen=True)
class _HubSet:
    """A public set: one file of it, at one revision, is more than any calibration needs."""

    repo: str
    revision: str
    file: str
    articles: bool = False  # rows are lines; a heading begins a new document


HUB_SETS: dict[str, _HubSet] = {
    "ultrachat": _HubSet(
        "HuggingFaceH4/ultrachat_200k",
        "8049631c405ae6576f93f445c6b8166f76f5505a",
        "data/train_sft-00000-of-00003-a3ecf92756993583.parquet",
    ),
    "wikitext2": _HubSet(
        "Salesforce/wikitext",
        "b08601e04326c79dfdd32d625aee71d232d685c3",
        "wikitext-2-raw-v1/train-00000-of-00001.parquet",
        articles=True,
    ),
    "c4": _HubSet(
        "allenai/c4",
        "1588ec454efa1a09f29cd18ddd04fe05fc8653a2",
        "en/c4-train.00000-of-01024.json.gz",
    ),
    "pile": _HubSet(
        "NeelNanda/pile-10k",
        "127bfedcd5047750df5ccf3a12979a47bfa0bafa",
        "data/train-00000-of-00001-4746b8785c874cc7.parquet",
    ),
}
AUTO = "ultrachat"  # what `auto` is where the hub can be had
ELSEWHERE = (
    "`dataset: embedded` needs no network; `dataset: file:PATH` reads a local .txt, .jsonl or .parquet"
)


@dataclass(frozen=True)
class _Document:
    """One piece of a source. Documents of one group repeat each other and stay on one side."""

    content: str | list[dict[str, Any]]  # text, or the messages of a conversation
    group: str
    where: str


# ------------------------------------------------------------------------------------------------ resolve


def resolve_dataset(calibration: Calibration, *, online: Callable[[], bool] | None = None) -> ResolvedData:
    """Settle what the recipe's `dataset` is on this machine: seconds at most, no tokenizer, no download.

    `auto` is the hub's set where it can be had, that is where its file is in the hub's local cache or
    the hub answers a probe of at most three seconds, and the embedded text elsewhere. With
    HF_HUB_OFFLINE set nothing is asked.

    Args:
        calibration: the recipe's section.
        online: replaces the probe of the hub.

    Raises:
        CompressError: an unknown name; a file that is missing, a directory, empty or unreadable; a hub
            set asked for by name that is neither cached nor reachable.
    """
    asked = calibration.dataset
    if asked.startswith("file:"):
        path = _existing_file(asked)
        return ResolvedData(f"file:{path}", asked, "", _file_sha256(path))
    if asked == "auto":
        here, reason = _obtainable(HUB_SETS[AUTO], online)
        if here:
            return ResolvedData(AUTO, asked, reason, None)
        return ResolvedData("embedded", asked, f"{reason}; embedded text used", _embedded_sha256())
    if asked == "embedded":
        return ResolvedData(asked, asked, "", _embedded_sha256())
    if asked == "self":
        return ResolvedData(asked, asked, "", None)
    if asked not in HUB_SETS:
        hint = f"write `dataset: file:{asked}` for a file" if "/" in asked or "." in asked else None
        known = [*HUB_SETS, "auto", "self", "embedded", "file:PATH"]
        raise CompressError(
            f"unknown dataset {asked!r}; {nearest(asked, known)}", where="calibration.dataset", hint=hint
        )
    here, reason = _obtainable(HUB_SETS[asked], online)
    if not here:
        raise _unreachable(asked, reason)
    return ResolvedData(asked, asked, "", None)


def _obtainable(hub_set: _HubSet, online: Callable[[], bool] | None) -> tuple[bool, str]:
    """Whether the set can be had, and why."""
    if _cached_file(hub_set) is not None:
        return True, "found in the hub's local cache"
    if switch := _offline_switch():
        return False, f"{switch} is set and the set is not cached"
    if (online or (lambda: _hub_answers(hub_set)))():
        return True, "hub reachable"
    return False, "hub not reachable"


def _offline_switch() -> str | None:
    """The environment variable that forbids network access, if one is set."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    true = {"1", "ON", "YES", "TRUE"}
    return next((name for name in names if os.environ.get(name, "").upper() in true), None)


def _cached_file(hub_set: _HubSet) -> Path | None:
    """The set's file in the hub's local cache, at the pinned revision."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_set.repo, hub_set.file, repo_type="dataset", revision=hub_set.revision)
    return Path(found) if isinstance(found, str) else None


def _hub_answers(hub_set: _HubSet) -> bool:
    """One small request about the set, without retries, given up after PROBE_SECONDS in all.

    In a thread, because a name server that does not answer blocks past any timeout of the socket's.
    """
    import http.client
    import urllib.request

    from huggingface_hub.constants import ENDPOINT

    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                f"{ENDPOINT}/api/datasets/{hub_set.repo}", timeout=PROBE_SECONDS
            ) as reply:
                # JSON, so that the page of a captive portal is not taken for the hub
                answers.append("json" in reply.headers.get("content-type", ""))
        except (OSError, http.client.HTTPException, ValueError):
            answers.append(False)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return answers == [True]


def _unreachable(alias: str, why: str) -> CompressError:
    return CompressError(
        f"dataset {alias!r} ({HUB_SETS[alias].repo}) cannot be had: {why}",
        where="calibration.dataset",
        hint=ELSEWHERE,
    )


def _existing_file(asked: str) -> Path:
    """The absolute path of `file:PATH`, checked to be a file with something in it."""
    name = asked.removeprefix("file:")
    path = Path(os.path.abspath(Path(name).expanduser()))
    hint = "give the path of a .txt, .jsonl or .parquet file"
    if not name or not path.exists():
        raise CompressError(f"no such file: {name or '(empty path)'}", where=f"dataset: {asked}", hint=hint)
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise CompressError(f"{path} is {kind}", where=f"dataset: {asked}", hint=hint)
    if path.stat().st_size == 0:
        raise CompressError(f"{path} is empty", where=f"dataset: {asked}", hint=hint)
    return path


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to read `path` into the user's error."""
    try:
        yield
    except OSError as error:
        raise CompressError(
            f"cannot read {path}: {error.strerror or error}",
            where="calibration.dataset",
            hint="check the file's permissions and its disk",
        ) from error


def _file_sha256(path: Path) -> str:
    with _readable(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _embedded_sha256() -> str:
    return hashlib.sha256(embedded_text("calibration").encode()).hexdigest()


# --------------------------------------------------------------------------------------------------- load


def load_windows(
    resolved: ResolvedData,
    calibration: Calibration,
    tokenizer: Any,
    *,
    heldout: int,
    generate: Callable[..., torch.Tensor] | None = None,
) -> Windows:
    """Calibration and held-out windows of the resolved set.

    A text file: the windows of `tokenizer(text).input_ids`, in order; the first `samples` calibrate, the
    next `heldout` are held out; the seed plays no part. Sources of many documents: the documents are
    put in an order drawn from `random.Random(seed)` (a streamed hub set in blocks of `HUB_BLOCK`, so
    that no more is read than needed); calibration takes from the front until it has its windows; the
    held-out documents are the next ones in that same order which repeat nothing that calibration read
    (same `group`). When those are too few, the held-out windows are the ones that follow in the joined
    stream, and `counts["shared_documents"]` says 1. `self`: `generate(n_windows, seq_len, seed)` gives
    int64 [n_windows, seq_len]; windows in place of repeated ones are asked for with the next seeds.

    A repeated window is dropped wherever it occurs. The tokenizer is left as it was, its truncation and
    padding settings included.

    Args:
        resolved: from `resolve_dataset`.
        calibration: the recipe's section.
        tokenizer: a tokenizer as transformers' auto class loads it.
        heldout: how many windows to hold out, 0 or more.
        generate: draws windows from the model itself; needed by `self` only.

    Raises:
        CompressError: too few tokens; a file that cannot be read, decoded or parsed; neither a text nor a
            messages column; messages without a chat template; the hub lost on the way; `self`
            without `generate`.
    """
    assert heldout >= 0, heldout
    samples, seq_len = calibration.samples, calibration.seq_len
    if resolved.dataset == "self":
        cut = _generated(calibration, heldout, generate)
    elif _is_text_file(resolved.dataset):
        text = _read_text(_path_of(resolved.dataset))
        with _untouched(tokenizer):
            cut = _cut_text(_text_ids(tokenizer, text), seq_len, samples, heldout)
    else:
        documents = _documents(resolved.dataset, calibration.seed)
        plain = resolved.asked == "auto"  # nobody chose conversations, so a base model is not refused
        with _untouched(tokenizer):
            cut = _cut_documents(_tokenised(documents, tokenizer, plain), seq_len, samples, heldout)
    if len(cut.windows) < samples or len(cut.heldout) < heldout:
        raise _too_short(resolved, calibration, cut, heldout)
    return _pack(cut, seq_len, getattr(tokenizer, "bos_token_id", None))


def evaluation_windows(tokenizer: Any, text: str, *, windows: int, seq_len: int) -> torch.Tensor:
    """The first `windows` consecutive windows of `text`, tokenised whole: int64 [windows, seq_len].

    Raises:
        CompressError: the text is too short.
    """
    with _untouched(tokenizer):
        ids = _text_ids(tokenizer, text)
    need = windows * seq_len
    if len(ids) < need:
        raise CompressError(
            f"the text has {len(ids):,} tokens; {windows} windows of {seq_len} need {need:,}",
            hint=f"ask for at most {len(ids) // seq_len} windows, or for shorter ones",
        )
    return torch.tensor(ids[:need], dtype=torch.int64).reshape(windows, seq_len)


@dataclass
class _Cut:
    """What cutting a source gave: windows of int64 [seq_len], and what was met on the way."""

    windows: list[torch.Tensor]
    heldout: list[torch.Tensor]
    counts: dict[str, int]


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

    def between(self, start: int, stop: int) -> list[torch.Tensor]:
        return list(itertools.islice(self.windows.values(), start, stop))


def _cut_text(ids: list[int], seq_len: int, samples: int, heldout: int) -> _Cut:
    """One document: consecutive windows, the first ones and the next ones."""
    cutter = _Cutter(seq_len, samples + heldout)
    cutter.add(ids)
    counts = {
        "documents": 1,
        "heldout_documents": min(heldout, 1),
        "duplicate_windows": cutter.duplicates,
        "duplicate_documents": 0,
        "shared_documents": min(heldout, 1),
        "untemplated_documents": 0,
        "available_tokens": len(ids),
    }
    return _Cut(cutter.between(0, samples), cutter.between(samples, samples + heldout), counts)


@dataclass
class _Stream:
    """Tokenised documents, (group, ids) each, in order; counts what it hands out and leaves out."""

    items: Iterator[tuple[str, list[int]]]
    tokens: int = 0
    duplicates: int = 0
    untemplated: int = 0

    def __iter__(self) -> Iterator[tuple[str, list[int]]]:
        for group, ids in self.items:
            self.tokens += len(ids)
            yield group, ids


def _cut_documents(stream: _Stream, seq_len: int, samples: int, heldout: int) -> _Cut:
    """Many documents: held-out windows from documents of groups that calibration did not read."""
    documents = iter(stream)
    main = _Cutter(seq_len, samples + heldout)
    read: set[str] = set()
    while len(main.windows) < samples and (item := next(documents, None)):
        read.add(item[0])
        main.add(item[1])
    calibrating = main.documents
    held = _Cutter(seq_len, heldout, known=frozenset(itertools.islice(main.windows, samples)))
    rest: list[list[int]] = []
    while not held.full and (item := next(documents, None)):
        rest.append(item[1])
        if item[0] not in read:
            held.add(item[1])
    shared = not held.full
    if shared:
        for ids in rest:
            main.add(ids)
    counts = {
        "documents": calibrating,
        "heldout_documents": main.documents - calibrating if shared else held.documents,
        "duplicate_windows": main.duplicates + (0 if shared else held.duplicates),
        "duplicate_documents": stream.duplicates,
        "shared_documents": int(shared),
        "untemplated_documents": stream.untemplated,
        "available_tokens": stream.tokens,
    }
    following = main.between(samples, samples + heldout) if shared else held.between(0, heldout)
    return _Cut(main.between(0, samples), following, counts)


def _generated(calibration: Calibration, heldout: int, generate: Callable[..., torch.Tensor] | None) -> _Cut:
    """Windows that the model itself draws; each is a document of its own."""
    if generate is None:
        raise CompressError(
            "dataset 'self' draws its windows from the model, and nothing here can run the model",
            where="calibration.dataset",
            hint=f"use another dataset: {ELSEWHERE}",
        )
    seq_len, samples, need = calibration.seq_len, calibration.samples, calibration.samples + heldout
    cutter, tokens = _Cutter(seq_len, need), 0
    for again in range(SELF_ROUNDS):
        missing = need - len(cutter.windows)
        if not missing:
            break
        drawn = generate(missing, seq_len, calibration.seed + again)
        assert tuple(drawn.shape) == (missing, seq_len), (tuple(drawn.shape), missing, seq_len)
        assert not drawn.is_floating_point(), drawn.dtype
        tokens += drawn.numel()
        cutter.add(drawn.to("cpu", torch.int64).flatten().tolist())
    counts = {
        "documents": min(samples, len(cutter.windows)),
        "heldout_documents": max(0, len(cutter.windows) - samples),
        "duplicate_windows": cutter.duplicates,
        "duplicate_documents": 0,
        "shared_documents": 0,
        "untemplated_documents": 0,
        "available_tokens": tokens,
    }
    return _Cut(cutter.between(0, samples), cutter.between(samples, need), counts)


def _too_short(resolved: ResolvedData, calibration: Calibration, cut: _Cut, heldout: int) -> CompressError:
    """Never silently fewer windows: how many tokens there are, how many are needed, what to do."""
    samples, seq_len = calibration.samples, calibration.seq_len
    have, counts = len(cut.windows) + len(cut.heldout), cut.counts
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


def _pack(cut: _Cut, seq_len: int, bos: int | None) -> Windows:
    """Both tensors, their hash and the counts."""
    tokens_NT, heldout_NT = (
        torch.stack(part) if part else torch.empty(0, seq_len, dtype=torch.int64)
        for part in (cut.windows, cut.heldout)
    )
    digest = hashlib.sha256()
    for part_NT in (tokens_NT, heldout_NT):
        digest.update(json.dumps(list(part_NT.shape)).encode())
        digest.update(part_NT.numpy().astype("<i8").tobytes())
    counts = {
        "tokens": tokens_NT.numel(),
        "heldout_tokens": heldout_NT.numel(),
        "bos": 0 if bos is None else int((tokens_NT == bos).sum()),
        "unique_windows": len(tokens_NT) + len(heldout_NT),
        **cut.counts,
    }
    return Windows(tokens_NT, heldout_NT, digest.hexdigest(), counts)


# ----------------------------------------------------------------------------------------------- tokenise


@contextmanager
def _untouched(tokenizer: Any) -> Iterator[None]:
    """Leaves the tokenizer's truncation and padding as they were.

    Merely calling a fast tokenizer switches both off in its backend, and the tokenizer that is saved
    beside the weights would no longer be the one that came.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids, untruncated; `verbose=False` since longer than the model's context is no mistake here."""
    encoded = tokenizer(text, add_special_tokens=special, truncation=False, padding=False, verbose=False)
    return list(encoded.input_ids)


def _own_bos(tokenizer: Any) -> int | None:
    """The begin-of-sequence id if the tokenizer itself puts it in front of a text, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or _encode(tokenizer, "a", special=True)[:1] != [bos]:
        return None
    return None if _encode(tokenizer, "a", special=False)[:1] == [bos] else int(bos)


def _one_bos(ids: list[int], bos: int | None) -> list[int]:
    """`ids` beginning with exactly one `bos`, where the tokenizer begins texts with one."""
    if bos is None:
        return ids
    start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[start:]]


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """A text with the tokenizer's own special tokens."""
    return _one_bos(_encode(tokenizer, text, special=True), _own_bos(tokenizer))


def _tokenised(documents: Iterable[_Document], tokenizer: Any, plain: bool) -> _Stream:
    """The documents as (group, ids), repeats and blank ones left out.

    A chat template writes its own special tokens, so the tokenizer's are not added to it; only a BOS
    that the tokenizer would have begun with, and the template forgot, is put in front. With `plain` a
    tokenizer without a template gets the messages' texts instead of a refusal.
    """
    own = _own_bos(tokenizer)
    template = bool(getattr(tokenizer, "chat_template", None))

    def items() -> Iterator[tuple[str, list[int]]]:
        seen: set[bytes] = set()
        for document in documents:
            content, templated = document.content, False
            if isinstance(content, str):
                text = content
            elif template:
                text, templated = _templated(tokenizer, content, document.where), True
            elif plain:
                text = "\n\n".join(str(message.get("content") or "") for message in content)
                stream.untemplated += 1
            else:
                raise CompressError(
                    "the set holds conversations, and this tokenizer has no chat template to write them",
                    where=document.where,
                    hint="use a set with a text column, an instruct model's tokenizer, or another dataset",
                )
            if not text.strip():
                continue
            digest = _text_digest(text, document.where)
            if digest in seen:
                stream.duplicates += 1
                continue
            seen.add(digest)
            yield document.group, _one_bos(_encode(tokenizer, text, special=not templated), own)

    stream = _Stream(items())
    return stream


def _text_digest(text: str, where: str) -> bytes:
    try:
        return hashlib.sha256(text.encode()).digest()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise CompressError(
            f"the text holds half a surrogate pair, at character {error.start}",
            where=where,
            hint="mend or remove the line",
        ) from error


def _templated(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        raise CompressError(
            f"the tokenizer's chat template cannot write this conversation: {error}",
            where=where,
            hint="check the roles and their order, or give the set a text column instead",
        ) from error


# -------------------------------------------------------------------------------------------------- files


def _path_of(dataset: str) -> Path:
    return Path(dataset.removeprefix("file:"))


def _is_text_file(dataset: str) -> bool:
    return dataset.startswith("file:") and _path_of(dataset).suffix.lower() not in {".jsonl", ".parquet"}


def _read_text(path: Path) -> str:
    """The whole file, byte for byte but for a byte-order mark."""
    with _readable(path):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _undecodable(f"{path}:{line} (byte {error.start})") from error
    if not text.strip():
        raise CompressError(
            f"{path} is empty", where="calibration.dataset", hint="give a file with text in it"
        )
    return text


def _undecodable(where: str) -> CompressError:
    hint = "convert it: iconv -f latin1 -t utf-8 IN > OUT (or whatever its encoding is)"
    return CompressError("the file is not UTF-8", where=where, hint=hint)


def _documents(dataset: str, seed: int) -> Iterator[_Document]:
    """The documents of a many-document source in their seeded order."""
    if dataset == "embedded":
        return _shuffled_topics(seed)
    if dataset in HUB_SETS:
        return _hub_documents(dataset, seed)
    path = _path_of(dataset)
    return (
        _parquet_documents(path, seed) if path.suffix.lower() == ".parquet" else _jsonl_documents(path, seed)
    )


def _order(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _column(columns: Iterable[str], where: str) -> str:
    """The column to read: text before messages."""
    names = list(columns)
    for name in ("text", "messages"):
        if name in names:
            return name
    raise CompressError(
        f"no `text` and no `messages` column; there are: {', '.join(map(str, names)) or 'none'}",
        where=where,
        hint="rename the column that holds the text to `text`",
    )


def _document(value: Any, column: str, where: str) -> _Document:
    """A checked document; a missing value is a blank text, which is passed over later."""
    if column == "text" and (value is None or isinstance(value, str)):
        return _Document(value or "", where, where)
    if column == "messages" and isinstance(value, list) and value and all(map(_is_message, value)):
        # a column of structs gives every message every key: templates ask whether a key is there
        return _Document([{k: v for k, v in m.items() if v is not None} for m in value], where, where)
    expected = "a string" if column == "text" else "a list of {role, content}"
    raise CompressError(
        f"`{column}` is not {expected}: {str(value)[:60]!r}", where=where, hint="mend or remove it"
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _jsonl_documents(path: Path, seed: int) -> Iterator[_Document]:
    """One JSON object a line.

    Two passes: every line is checked and its place noted, then only the drawn lines are read again, so
    that the texts are never all in memory.
    """
    with _readable(path), path.open("rb") as file:
        places, numbers, column = array("q"), array("q"), ""
        place = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                record = _json_object(line, where)
                column = column or _column(record, where)
                _document(_value(record, column, where), column, where)
                places.append(place)
                numbers.append(number)
            place += len(line)
        for index in _order(len(places), seed):
            file.seek(places[index])
            where = f"{path}:{numbers[index]}"
            yield _document(_json_object(file.readline(), where)[column], column, where)


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _undecodable(f"{where} (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise CompressError(
            f"not JSON: {error.msg} at column {error.colno}", where=where, hint="one JSON object a line"
        ) from error
    if not isinstance(record, dict):
        raise CompressError("the line is not a JSON object", where=where, hint='write {"text": "…"}')
    return record


def _value(record: dict[str, Any], column: str, where: str) -> Any:
    if column not in record:
        raise CompressError(
            f"no `{column}`, which the first line has; there are: {', '.join(record) or 'none'}",
            where=where,
            hint=f"give every line a `{column}`",
        )
    return record[column]


def _parquet_documents(path: Path, seed: int) -> Iterator[_Document]:
    """The rows of a parquet file; its text or messages column is held whole."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _readable(path), pyarrow.parquet.ParquetFile(path) as file:
            column = _column(file.schema_arrow.names, str(path))
            values = file.read(columns=[column]).column(column)
    except pyarrow.ArrowException as error:
        raise CompressError(
            f"not a parquet file: {str(error).splitlines()[0]}", where=str(path), hint="check the file"
        ) from error
    for index in _order(len(values), seed):
        yield _document(values[index].as_py(), column, f"{path}, row {index}")


# ---------------------------------------------------------------------------------------------------- hub


def _hub_documents(alias: str, seed: int) -> Iterator[_Document]:
    """A hub set's documents, streamed; each block of HUB_BLOCK in an order of its own."""
    hub_set, rng = HUB_SETS[alias], random.Random(seed)
    rows = _hub_rows(alias)
    first = next(rows, {})
    column = _column(first, hub_set.repo)
    values = (row[column] for row in itertools.chain([first], rows))
    contents: Iterator[Any] = _articles(values) if hub_set.articles else values
    numbered = enumerate(contents)
    while block := list(itertools.islice(numbered, HUB_BLOCK)):
        rng.shuffle(block)
        for number, content in block:
            yield _document(content, column, f"{hub_set.repo}, document {number}")


def _hub_rows(alias: str) -> Iterator[dict[str, Any]]:
    """The rows of the set's file, from the hub's cache or read from the hub piece by piece."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    hub_set = HUB_SETS[alias]
    # the file itself and not the repository: no card is asked for, and no retries when the hub is away
    cached = _cached_file(hub_set)
    source = str(cached) if cached else f"hf://datasets/{hub_set.repo}@{hub_set.revision}/{hub_set.file}"
    builder = "parquet" if hub_set.file.endswith(".parquet") else "json"
    # the bases of the hub's own error are the HTTP library's, whichever it is, and OSError
    lost = (OSError, datasets.exceptions.DatasetsError, *HfHubHTTPError.__bases__)
    try:
        yield from datasets.load_dataset(builder, data_files={"train": source}, split="train", streaming=True)
    except lost as error:
        raise _unreachable(alias, str(error).splitlines()[0] if str(error) else repr(error)) from error


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


# ----------------------------------------------------------------------------------------------- embedded


def embedded_text(part: Literal["calibration", "evaluation"]) -> str:
    """The language reference that every Python carries, cleaned of nothing: one of its two parts.

    The topics are sorted; those that repeat each other (a paragraph of 60 characters or more in
    common, blanks aside, or one verbatim inside the other) make one group; groups are drawn in a fixed
    seeded order into the evaluation part while they fit into 23% of the characters, and the others are
    the calibration part. So no paragraph is on both sides.

    Raises:
        CompressError: this Python was installed without `pydoc_data`.
    """
    return "\n\n".join(text for _, text in _embedded_topics()[part])


def _shuffled_topics(seed: int) -> Iterator[_Document]:
    topics = _embedded_topics()["calibration"]
    for index in _order(len(topics), seed):
        group, text = topics[index]
        yield _Document(text, group, f"embedded, topic {index}")


@cache
def _embedded_topics() -> dict[str, tuple[tuple[str, str], ...]]:
    """(group, text) of every topic, by part, in the topics' order."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CompressError(
            "this Python was installed without its documentation (pydoc_data), the embedded text",
            where="calibration.dataset",
            hint="install the full standard library, or use `dataset: file:PATH`",
        ) from error
    groups = _groups(topics)
    sizes: dict[str, int] = {}
    for name, group in groups.items():
        sizes[group] = sizes.get(group, 0) + len(topics[name])
    room = EVALUATION_SHARE * sum(sizes.values())
    names = sorted(sizes)
    evaluation: set[str] = set()
    for index in _order(len(names), 0):
        group = names[index]
        if sizes[group] <= room:
            evaluation.add(group)
            room -= sizes[group]
    parts: dict[str, list[tuple[str, str]]] = {"calibration": [], "evaluation": []}
    for name, group in groups.items():
        parts["evaluation" if group in evaluation else "calibration"].append((group, topics[name]))
    return {part: tuple(members) for part, members in parts.items()}


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
