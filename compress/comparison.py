"""`compress compare A B C`: artifacts and other tools' checkpoints side by side, each measured against one base.

Each is judged as `compress eval` does, which measures only what is not known yet. What `eval` reports of each stays
where it is; the comparison is a folder with a page and a JSON document of its own.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress import artifact
from compress.errors import CompressError
from compress.evaluation.beside import Beside, beside, differences, html
from compress.evaluation.report import Report
from compress.files import replace
from compress.judge import base_name, judge
from compress.measure import Progress
from compress.pipeline import Outcome

_FOLDER = "comparison.json", "comparison.html"


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
        suite: a name or a file; by default an artifact's own, and of anything else "embedded".
        against: the base; by default that of the first artifact of ours.
        out: the comparison's folder, by default `comparisons/<names>`.
        force: also where they were not measured alike; what differs is then said.

    Raises:
        CompressError: fewer than two, one twice, no base, or figures that cannot stand side by side.
    """
    if len(set(targets)) < max(2, len(targets)):
        raise CompressError(
            "two checkpoints at least are compared, each named once", where="the command line",
            hint="compress compare ARTIFACT ARTIFACT …",
        )  # fmt: skip
    locks = [artifact.read_lock(Path(target)) for target in targets]
    ours = [lock for lock in locks if "compress" in lock.get("stages", {})]
    if against is None and not ours:
        raise CompressError(
            "none of these is an artifact, so their base is not known", where="the command line",
            hint="name it: --against BASE",
        )  # fmt: skip
    base = against or base_name(ours[0])
    outcomes = [_judged(target, suite, None if lock in ours and against is None else base, progress)
                for target, lock in zip(targets, locks, strict=True)]  # fmt: skip
    every = [outcome.report for outcome in outcomes]
    reports = {_name(report, i, every): report for i, report in enumerate(every)}
    apart = differences(reports)
    bases = {str(report["base"]["name"]) for report in reports.values()}
    if len(bases) > 1:
        apart.insert(0, f"they were compared with different bases: {', '.join(sorted(bases))}")
    if apart and not force:
        raise CompressError(
            f"they were not measured alike: {'; '.join(apart[:3])}", where=", ".join(targets),
            hint="measure them by one suite (--suite), against one base (--against); or --force, and it is said",
        )  # fmt: skip
    folder = out or Path("comparisons") / "--vs--".join(name.replace("/", "--") for name in reports)
    if folder.is_file() or (folder.is_dir() and any(p.name not in _FOLDER for p in folder.iterdir())):
        raise CompressError("the folder holds something else", where=str(folder), hint="choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    table = beside(reports, apart)
    links = {name: os.path.relpath(o.folder / "report.html", folder) for name, o in zip(reports, outcomes, strict=True)}
    artifact.write_json(folder / "comparison.json", document(Comparison(folder, table, reports)))
    replace(folder / "comparison.html", html(table, links).encode())
    return Comparison(folder, table, reports)


def _judged(target: str, suite: str | None, against: str | None, progress: Progress) -> Outcome:
    """A checkpoint's report, measured as far as it is not yet."""
    name = Path(target).name

    def tell(stage: str, done: int, total: int) -> None:
        progress(f"{name} {stage}", done, total)

    return judge(target, suite=suite, against=against, progress=tell)


def document(found: Comparison) -> dict[str, object]:
    """A comparison as plain data."""
    lines = []
    for name, cells, said in found.table.lines:
        shown = {h: {"value": c.value, "range": c.range} for h, c in zip(found.table.heads, cells, strict=True)}
        lines.append({"name": name, "verdict": said, **shown})
    return {"table": lines, "differences": found.table.differences, "reports": found.reports}


def _name(report: Report, index: int, every: Sequence[Report]) -> str:
    """The checkpoint's name; with a number where another is called the same."""
    name = str(report["artifact"]["name"])
    return name if [str(r["artifact"]["name"]) for r in every].count(name) == 1 else f"{name} ({index + 1})"
