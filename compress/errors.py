"""One exception for every mistake that a user can make.

A `CompressError` says what is wrong, where, and what to do next; the command line prints it without
a traceback and exits with code 2. Our own broken invariants are `assert`s and stay tracebacks.
"""

import difflib
from collections.abc import Iterable


class CompressError(Exception):
    """A mistake of the user or of the machine that the user can mend.

    Args:
        what: one sentence, what is wrong.
        where: the file, line, key or tensor it concerns.
        hint: what to do next, as a command or a choice where there is one.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The message as the command line prints it, one fact a line."""
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.hint:
            parts.append(f"  do: {self.hint}")
        return parts


def nearest(word: str, choices: Iterable[str]) -> str:
    """The closest spelling and the allowed values, as the end of an error's `what`."""
    allowed = sorted(choices)
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}Allowed: {', '.join(allowed)}"
