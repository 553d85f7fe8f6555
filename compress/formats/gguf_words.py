"""A tokenizer as a GGUF file says it: tokens, their kinds, merges or scores, special tokens, the chat template.

tokenizer.json is read as it stands, and nothing is guessed: how text is cut before merging ("pre-tokenizer") has to be
one of the rules that llama.cpp has a name for, else the format is refused. Byte-level BPE keeps its merges. The BPE
that was made of SentencePiece's (Gemma, Llama 2; spaces as "▁", bytes as <0x..>) becomes llama.cpp's `llama` kind: that
joins the pair whose result has the highest score, so a token's score is less, the later it is first merged.

Special tokens and the chat template are found by the library's `SpecialVocab`.

Left out: unigram and WordPiece tokenizers; tokenizers without tokenizer.json.
"""

import json
from pathlib import Path
from typing import Any

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_GPT2 = {"type": "ByteLevel", "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names of the rules by which text is cut, with the expression or the digits' rule before GPT-2's.
_SPLITS = {_WORDS.format(digits="{1,3}"): "llama-bpe", _WORDS.format(digits=""): "qwen2", _TEKKEN: "tekken"}


def rules(document: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a byte-level tokenizer cuts text; None when it has none."""
    said = document.get("pre_tokenizer") or {}
    steps = said.get("pretokenizers", [said])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True) and not steps[0].get("invert"):
        return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))
    return None


def _spaces(document: dict[str, Any]) -> bool | None:
    """Of a tokenizer that was SentencePiece's: whether it puts a space in front of a text; None of any other."""
    steps = [document.get("normalizer") or {}]
    steps = [part for step in steps for part in step.get("normalizers", [step])]
    replaces = any(s.get("type") == "Replace" and s.get("content") == "▁" for s in steps)
    prepends = any(s.get("type") == "Prepend" for s in steps)
    meta = document.get("pre_tokenizer") or {}
    if meta.get("type") == "Metaspace":
        return str(meta.get("prepend_scheme", "always")) != "never"
    return prepends if replaces and document["model"].get("byte_fallback") else None


def refusal(folder: Path) -> str | None:
    """Why llama.cpp would cut text otherwise than the tokenizer in a folder; None when it would not."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return "its tokenizer has no tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    kind = document["model"].get("type")
    if kind != "BPE":
        return f"its tokenizer is of the kind {kind}; BPE is written"
    if _spaces(document) is None and rules(document) is None:
        return "its tokenizer cuts text by rules that llama.cpp has no name for"
    if _spaces(document) is None and (document.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        return f"its tokenizer changes text ({document['normalizer']['type']}), which llama.cpp does not"
    return None


def describe(writer: Any, folder: Path, vocabulary: int) -> None:
    """Adds a folder's tokenizer to a GGUFWriter, `vocabulary` tokens of it."""
    from gguf import SpecialVocab, TokenType

    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    spaces = _spaces(document)
    model, added = document["model"], document.get("added_tokens", [])
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    kinds = [int(TokenType.UNUSED)] * vocabulary
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, int(TokenType.NORMAL)
        if spaces is not None and len(token) == 6 and token.startswith("<0x"):  # <0x0A>
            kinds[number] = int(TokenType.BYTE)
    for token in added:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
    if spaces is not None and model.get("unk_token") in model["vocab"]:
        kinds[model["vocab"][model["unk_token"]]] = int(TokenType.UNKNOWN)
    if spaces is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rules(document))
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(spaces)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = SpecialVocab(folder, load_merges=spaces is None, n_vocab=vocabulary)
    special.add_special_token.setdefault("bos", _begins(document))
    special.add_to_gguf(writer, quiet=True)


def _begins(document: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a special token in front of a text."""
    said = document.get("post_processor") or {}
    steps = said.get("processors", [said])
    return any("SpecialToken" in (step.get("single") or [{}])[0] for step in steps)


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """A score for each token: less, the later a merge first makes it; what no merge makes comes last."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        ranks.setdefault(left + right, rank)
    return [float(-ranks.get(token, len(model["merges"]))) for token in tokens]
