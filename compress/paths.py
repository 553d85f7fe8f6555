"""Where the shipped data lie (recipes, suites) and where the cache is.

In a checkout `recipes/` and `eval/` stand beside the package; in a wheel they are inside it, under
`compress/_data/`. Everything that reads shipped data asks here.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """The folder of shipped data called `name` ("recipes" or "eval")."""
    packed = _PACKAGE / "_data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


def cache_dir() -> Path:
    """`$COMPRESS_CACHE`, else `$XDG_CACHE_HOME/compress`, else `~/.cache/compress` (made when used)."""
    chosen = os.environ.get("COMPRESS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "compress"
