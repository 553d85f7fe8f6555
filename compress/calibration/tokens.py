"""From texts and conversations to token ids: special tokens once, nothing truncated, no tokenizer changed."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from compress.calibration.files import Document
from compress.errors import CompressError


@contextmanager
def untouched(tokenizer: Any) -> Iterator[None]:
    """Leaves the tokenizer's truncation and padding as they were.

    Merely calling a fast tokenizer switches both off in its backend, and the tokenizer that is saved
    beside the weights would no longer be the one that came.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    try:
        yield
    finally:
        if backend is not None and truncation is not None:
            backend.enable_truncation(**truncation)
        if backend is not None and padding is not None:
            backend.enable_padding(**padding)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """A text with the tokenizer's own special tokens."""
    return _one_bos(_encode(tokenizer, text, special=True), _own_bos(tokenizer))


def tokenised(
    documents: Iterable[Document], tokenizer: Any, counts: Counter[str], *, plain: bool
) -> Iterator[tuple[str, list[int]]]:
    """(group, ids) of the documents without blank and repeated ones; `counts` says how many were left out.

    A chat template writes its own special tokens, so the tokenizer's are not added to it; only a BOS
    that the tokenizer would have begun with, and the template forgot, is put in front. With `plain` a
    tokenizer without a template gets the messages' texts instead of a refusal.
    """
    own = _own_bos(tokenizer)
    template = bool(getattr(tokenizer, "chat_template", None))
    seen: set[bytes] = set()
    for document in documents:
        content, special = document.content, True
        if isinstance(content, str):
            text = content
        elif template:
            text, special = _templated(tokenizer, content, document.where), False
        elif plain:
            text = "\n\n".join(str(message.get("content") or "") for message in content)
            counts["untemplated_documents"] += 1
        else:
            raise CompressError(
                "the set holds conversations, and this tokenizer has no chat template to write them",
                where=document.where,
                hint="use a set with a text column, an instruct model's tokenizer, or another dataset",
            )
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            counts["duplicate_documents"] += 1
        elif text.strip():
            seen.add(digest)
            yield document.group, _one_bos(_encode(tokenizer, text, special=special), own)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids, untruncated; `verbose=False` since longer than the model's context is no mistake here."""
    encoded = tokenizer(text, add_special_tokens=special, truncation=False, padding=False, verbose=False)
    return list(encoded.input_ids)


def _own_bos(tokenizer: Any) -> int | None:
    """The begin-of-sequence id if the tokenizer itself puts it in front of a text, else None."""
    first = next(iter(_encode(tokenizer, "a", special=True)), None)
    return first if first == getattr(tokenizer, "bos_token_id", None) else None


def _one_bos(ids: list[int], bos: int | None) -> list[int]:
    """`ids` beginning with exactly one `bos`, where the tokenizer begins texts with one."""
    if bos is None:
        return ids
    start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[start:]]


def _templated(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        what = f"the tokenizer's chat template cannot write this conversation: {error}"
        raise CompressError(what, where=where, hint="check the roles and their order") from error
