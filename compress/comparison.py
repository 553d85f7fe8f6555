"""`compress compare A B C`: artifacts and other tools' checkpoints side by side, each measured against one base.

Each is judged as `compress eval` does, which measures only what is not known yet. What `eval` reports of each stays
where it is; the comparison is a folder with a page and a JSON document of its own.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress import artifact
from compress.errors import CompressError
from compress.evaluation.beside import Beside, beside, differences, html
from compress.evaluation.report import Report
from compress.files import joined_name, replace
from compress.judge import Terms, base_name, find, is_ours, judge, terms_of
from compress.measure import Progress
from compress.pipeline import Outcome

_FILES = "comparison.json", "comparison.html"


@dataclass(frozen=True)
class Comparison:
    """What a comparison leaves: its folder, its table, and the report of each checkpoint by its name."""

    folder: Path
    table: Beside
    reports: dict[str, Report]


def compare(
    targets: Sequence[str], *, suite: str | None, against: str | None, out: Path | None, force: bool, progress: Progress
) -> Comparison:
    """Measures what is not measured yet, and puts the checkpoints side by side.

    Args:
        targets: artifacts, models as `--model` takes them, or GGUF files; two at least.
        suite: a name or a file; by default an artifact's own, and of anything else the first artifact's.
        against: the base; by default that of the first artifact of ours.
        out: the comparison's folder, by default `comparisons/<names>`.
        force: also where they were not measured alike; what differs is then said.

    Raises:
        CompressError: fewer than two, one twice, no base, or figures that cannot stand side by side.
    """
    if len(targets) < 2 or len({_place(target) for target in targets}) < len(targets):
        raise CompressError(
            "two checkpoints at least are compared, each named once", where=", ".join(targets) or "the command line",
            hint="compress compare ARTIFACT ARTIFACT …",
        )  # fmt: skip
    found = [_Asked(target, artifact.read_lock(Path(target).expanduser())) for target in targets]
    first = next((asked for asked in found if asked.ours), None)
    if against is None and first is None:
        raise CompressError(
            "none of these is an artifact, so their base is not known", where="the command line",
            hint="name it: --against BASE",
        )  # fmt: skip
    base = against or base_name(first.lock if first else {})
    for asked in found:  # what is wrong with a name is said before anything is measured
        find(asked.target, base)
    if out is not None:
        _check_out(out, [*targets, base])
    terms = {asked.target: asked.terms(suite) for asked in found if asked.ours}
    if not force:
        _check_terms(terms)
    others = terms[first.target] if first else terms_of({}, suite, Path())
    outcomes = [_judged(asked, suite, base if against or not asked.ours else None, others, progress) for asked in found]
    reports = dict(zip(_names([outcome.report for outcome in outcomes]), (o.report for o in outcomes), strict=True))
    apart = differences(reports)
    if apart and not force:
        raise CompressError(
            f"they were not measured alike: {'; '.join(apart[:3])}", where=", ".join(targets),
            hint="measure them by one suite (--suite), against one base (--against); or --force, and it is said",
        )  # fmt: skip
    folder = out or Path("comparisons") / joined_name(reports)
    _check_out(folder, [*targets, base])
    made = Comparison(folder, beside(reports, apart), reports)
    links = {name: os.path.relpath(o.folder / "report.html", folder) for name, o in zip(reports, outcomes, strict=True)}
    with artifact.claimed(folder):
        artifact.write_json(folder / "comparison.json", document(made))
        replace(folder / "comparison.html", html(made.table, links).encode())
    return made


@dataclass(frozen=True)
class _Asked:
    """A checkpoint as it was named, and its lock; an empty one of what is no artifact of ours."""

    target: str
    lock: dict[str, Any]

    @property
    def ours(self) -> bool:
        return is_ours(self.lock)

    def terms(self, suite: str | None) -> Terms:
        return terms_of(self.lock, suite, Path(self.target))


def _place(target: str) -> str:
    """What a name means: of what lies on this disk, where."""
    path = Path(target).expanduser()
    return str(path.resolve()) if path.exists() else target


def _check_terms(terms: Mapping[str, Terms]) -> None:
    """Refuses artifacts whose own suites and margins differ, before anything is measured.

    Raises:
        CompressError: they do.
    """
    said = {name: f"{Path(name).name} by {t.suite.name} within {t.delta:g}" for name, t in terms.items()}
    if len({t.suite.model_copy(update={"name": "", "summary": ""}) for t in terms.values()}) > 1:
        raise CompressError(
            f"their recipes name different suites: {', '.join(said.values())}", where=", ".join(terms),
            hint="name one for all: --suite SUITE; or --force, and it is said",
        )  # fmt: skip
    by_accuracy = any(t.suite.basis == "accuracy" for t in terms.values())
    if by_accuracy and len({t.delta for t in terms.values()}) > 1:
        raise CompressError(
            f"their verdicts allow different losses: {', '.join(said.values())}", where=", ".join(terms),
            hint="run their recipes with one `evaluate.delta`, which measures nothing anew; or --force, and it is said",
        )  # fmt: skip


def _check_out(folder: Path, named: Sequence[str]) -> None:
    """Refuses a folder that cannot be written, is part of what is compared, or holds anything but a comparison.

    Raises:
        CompressError: it is one of them.
    """
    for path in (Path(name).expanduser() for name in named):
        artifact.check_place(folder, path if path.is_dir() else None)
    if folder.is_dir() and any(path.name.removesuffix(".tmp") not in _FILES for path in folder.iterdir()):
        raise CompressError("the folder holds something else", where=str(folder), hint="choose another --out")


def _judged(asked: _Asked, suite: str | None, against: str | None, terms: Terms, progress: Progress) -> Outcome:
    """A checkpoint's report, measured as far as it is not yet."""
    name = Path(asked.target).name

    def tell(stage: str, done: int, total: int) -> None:
        progress(f"{name} {stage}", done, total)

    return judge(asked.target, suite=suite, against=against, others=terms, progress=tell)


def document(found: Comparison) -> dict[str, object]:
    """A comparison as plain data."""
    lines = []
    for name, cells, said in found.table.lines:
        shown = {h: {"value": c.value, "range": c.range} for h, c in zip(found.table.heads, cells, strict=True)}
        lines.append({"name": name, "verdict": said, **shown})
    return {"table": lines, "differences": found.table.differences, "reports": found.reports}


def _names(reports: Sequence[Report]) -> list[str]:
    """The checkpoints' names; with a number where another is called the same."""
    names = [str(report["artifact"]["name"]) for report in reports]
    return [name if names.count(name) == 1 else f"{name} ({i + 1} of {len(names)})" for i, name in enumerate(names)]
