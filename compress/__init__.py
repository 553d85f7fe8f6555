"""Compress language models, and know what it costs.

Importing this does nothing heavy: what is named here is loaded when it is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.runtimes.packed import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from compress.runtimes import packed

    return getattr(packed, name)
