"""One exception for every mistake that a user can make.

A `CompressError` says what is wrong, where, and what to do next; the command line prints it without
a traceback and exits with code 2. Our own broken invariants are `assert`s and stay tracebacks.
"""

import difflib
import textwrap
from collections.abc import Iterable, Iterator

_WIDTH = 100  # columns of a message


class CompressError(Exception):
    """A mistake of the user or of the machine that the user can mend.

    Args:
        what: one sentence, what is wrong.
        where: the file, line, key or tensor it concerns.
        hint: what to do next, as a command or a choice where there is one. Lines that begin with a space are to be
            copied, and are printed as they are.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n".join(self._facts()))

    def lines(self) -> list[str]:
        """The message as the command line prints it, behind its word "error: "; long facts take several lines."""
        return [line for fact in self._facts() for line in _wrapped(fact)]

    def _facts(self) -> list[str]:
        parts = [self.what]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.hint:
            parts.append(f"  do: {self.hint}")
        return parts


def _wrapped(fact: str) -> Iterator[str]:
    """The fact's lines, at most `_WIDTH` wide where words allow; places and what is to be copied stay whole."""
    for number, line in enumerate(fact.splitlines()):
        if line.startswith("  where: ") or (number and line.startswith(" ")):
            yield line
            continue
        yield from textwrap.wrap(
            line, _WIDTH - len("error: "), subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False,
        )  # fmt: skip


def nearest(word: str, choices: Iterable[str]) -> str:
    """The closest spelling and the allowed values, as the end of an error's `what`."""
    allowed = sorted(choices)
    spelt = {choice.lower(): choice for choice in allowed}
    close = difflib.get_close_matches(word.lower(), spelt, n=1, cutoff=0.5)
    guess = f"did you mean {spelt[close[0]]!r}? " if close else ""
    return f"{guess}Allowed: {', '.join(allowed)}"
