"""Literal tables name -> "module:NAME", resolved when an entry is used.

Nothing heavy is imported to list what there is, and nothing registers itself by being imported.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from compress.errors import CompressError, nearest


def resolve(table: Mapping[str, str], name: str, *, kind: str, where: str | None = None) -> Any:
    """The object that `table` names.

    Raises:
        CompressError: there is no such entry; the nearest spelling is named.
    """
    if name not in table:
        hint = f"correct the spelling, or use another {kind}"
        raise CompressError(f"unknown {kind} {name!r}; {nearest(name, table)}", where=where, hint=hint)
    module, attribute = table[name].split(":")
    return getattr(importlib.import_module(module), attribute)
