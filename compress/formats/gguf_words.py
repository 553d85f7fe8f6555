"""A tokenizer as a GGUF file says it: tokens, their kinds, merges or scores, special tokens, the chat template.

tokenizer.json is read as it stands, and nothing is guessed: how text is cut before merging ("pre-tokenizer") has to be
one of the rules that llama.cpp has a name for, else the format is refused. Byte-level BPE keeps its merges. The BPE
that was made of SentencePiece's (Gemma, Llama 2; spaces as "▁", bytes as <0x..>) becomes llama.cpp's `llama` kind: that
joins the pair whose result has the highest score, so a token's score is less, the later it is first merged.

Special tokens and the chat template are found by the library's `SpecialVocab`.

Of text that is not in Unicode's composed form (NFC) llama.cpp makes other tokens than Qwen's tokenizer, which composes
it first: everyone's files of Qwen have that.

Left out: unigram and WordPiece tokenizers; tokenizers without tokenizer.json.
"""

import json
from pathlib import Path
from typing import Any

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
# Of these llama.cpp takes a whole word from the vocabulary, whatever the merges say (`ignore_merges`).
_WHOLE_WORDS = ("llama-bpe", "tekken")


def rules(document: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a byte-level tokenizer cuts text; None when it has none."""
    said = document.get("pre_tokenizer") or {}
    steps = said.get("pretokenizers", [said])
    kinds, last = [step.get("type") for step in steps], steps[-1]
    if kinds[-1:] != ["ByteLevel"] or last.get("add_prefix_space"):
        return None
    name = None
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        name = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
        name = "smollm"
    elif kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        name = _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", "")) if isolated else None
    whole = bool(document["model"].get("ignore_merges"))
    return name if whole == (name in _WHOLE_WORDS) else None


def _spaces(document: dict[str, Any]) -> bool | None:
    """Of a tokenizer that was SentencePiece's: whether it puts a space in front of a text; None of any other."""
    if not document["model"].get("byte_fallback"):
        return None
    said = document.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = said.get("normalizers", [said])
    replacing = [s for s in steps if s.get("type") == "Replace"]
    prepending = [s for s in steps if s.get("type") == "Prepend"]
    known = all(s.get("pattern") == {"String": " "} and s.get("content") == "▁" for s in replacing)
    known = known and all(s.get("prepend") == "▁" for s in prepending)
    if not known or len(replacing) + len(prepending) != len(steps):
        return None
    cut = document.get("pre_tokenizer")
    if cut is not None and cut.get("type") == "Metaspace" and not steps:
        ours = cut.get("replacement") == "▁" and cut.get("split") is False
        return cut.get("prepend_scheme", "always") != "never" if ours else None
    at_spaces = cut is None or (cut.get("type") == "Split" and cut.get("pattern") == {"String": " "})
    return bool(prepending) if replacing and at_spaces else None


def refusal(folder: Path) -> str | None:
    """Why llama.cpp would cut text otherwise than the tokenizer in a folder; None when it would not."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return "its tokenizer has no tokenizer.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        model = document["model"]
    except (ValueError, KeyError, TypeError):
        return "its tokenizer.json is not one"
    if model.get("type") != "BPE":
        return f"its tokenizer is of the kind {model.get('type')}; BPE is written"
    if not model.get("merges"):
        return "its tokenizer has no merges, without which llama.cpp does not load it"
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd:
        return f"its tokenizer has a {odd[0]}, which llama.cpp does not know"
    if _spaces(document) is None and rules(document) is None:
        return "its tokenizer cuts text by rules that llama.cpp has no name for"
    if _spaces(document) is None and (document.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        return f"its tokenizer changes text ({document['normalizer']['type']}), which llama.cpp does not"
    wide = [t["content"] for t in document.get("added_tokens", []) if t.get("lstrip") or t.get("rstrip")]
    return f"its token {wide[0]!r} swallows the spaces beside it, which llama.cpp does not do" if wide else None


def describe(writer: Any, folder: Path, vocabulary: int) -> None:
    """Adds a folder's tokenizer to a GGUFWriter, `vocabulary` tokens of it."""
    from gguf import SpecialVocab, TokenType

    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    spaces = _spaces(document)
    model, added = document["model"], document.get("added_tokens", [])
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    kinds = [int(TokenType.UNUSED)] * vocabulary
    for token, number in model["vocab"].items():
        if number >= vocabulary:
            continue  # a token without a row in the embedding, such as Gemma's of images
        tokens[number], kinds[number] = token, int(TokenType.NORMAL)
        if spaces is not None and len(token) == 6 and token.startswith("<0x"):  # <0x0A>
            kinds[number] = int(TokenType.BYTE)
    for token in (token for token in added if token["id"] < vocabulary):
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
