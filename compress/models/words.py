"""A model's words: its tokenizer and its generation settings, held to what loading the finished artifact will need."""

from pathlib import Path
from typing import Any

from compress.errors import CompressError
from compress.models.files import read_json

_WORDS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "*.model")
_WORDS_HINT = "put the model's tokenizer.json and tokenizer_config.json into the folder"


def tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.

    Raises:
        CompressError: there is none, or it cannot be read without running code.
    """
    from transformers import AutoTokenizer

    if not any(path for pattern in _WORDS for path in folder.glob(pattern)):
        raise CompressError(f"there is no tokenizer: none of {', '.join(_WORDS)}", where=str(folder), hint=_WORDS_HINT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    with _TokenizerFaults(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class _TokenizerFaults:
    """What loading a tokenizer raises, as ours; the library's compiled part raises nothing but a bare `Exception`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        known = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
        if kind is Exception or isinstance(error, known):
            said = " ".join(str(error).split())[:200]
            raise CompressError(
                f"the tokenizer cannot be loaded: {said}", where=str(self.folder), hint=_WORDS_HINT
            ) from error


def end_tokens(folder: Path, words: Any) -> list[int]:
    """The tokens that end a model's output: as `generate` has them, else its config's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        named = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        found = [token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)]
        if found:
            return found
    return [] if words.eos_token_id is None else [int(words.eos_token_id)]


def check_generation(folder: Path) -> None:
    """Refuses a `generation_config.json` that would keep the finished model from loading.

    Raises:
        CompressError: it is not JSON, or its values are wrong.
    """
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.is_file():
        return
    settings = read_json(path)
    try:
        GenerationConfig.from_dict(settings).validate()
    except (ValueError, TypeError, AttributeError) as error:
        said = " ".join(str(error).split())[:200]
        what = f"generation_config.json is refused by transformers: {said}"
        raise CompressError(what, where=str(path), hint="correct it, or take it out of the folder") from error
