"""Draws a report's charts: pictures for the card, and what the page needs to show them itself.

The library that draws (vl-convert) is a JavaScript engine: with Altair some 170 MiB and three seconds, and 80 MiB
and two seconds more to make the page's script. The process that compresses is promised to stay small, so the
engine lives in a worker that is gone when the charts are there; the caller grows by the page alone. It runs only
for a report with measurements of a suite, which have conditions: what the walk alone knows (the error of each
block, and a few figures) the page shows without charts, and `--no-eval` costs nothing. The script, a megabyte
that depends on the libraries' versions alone, is kept in the cache.

Left out: pictures for the page of readers without scripts: its tables have every number.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import CHARTS
from compress.evaluation.charts import NAMES, charts
from compress.evaluation.marks import Chart, picture
from compress.evaluation.report import Report
from compress.files import replace
from compress.paths import cache_dir
from compress.workers import call, serve

FOLDER = CHARTS
_SCALE = 2  # pixels of a picture for each of its points: sharp on today's screens


@dataclass(frozen=True)
class Drawn:
    """The charts for the page, the script that shows them, and the pictures in the artifact's folder."""

    charts: tuple[Chart, ...]
    script: str
    pictures: tuple[tuple[str, str], ...]  # title and path, relative to the artifact


def draw(report: Report, folder: Path) -> Drawn | None:
    """Draws into `folder/charts`; None where no suite has measured anything yet.

    Pictures of charts that the report has no rows for any more are deleted.

    Raises:
        CompressError: the worker died.
    """
    if not any(row["conditions"] for row in report["measurements"]):
        _keep(folder, ())
        return None
    request = {"report": report, "folder": str(folder.resolve())}
    answer = call("compress.evaluation.draw", request, what="drawing the charts", where=str(folder))
    made = tuple(Chart(**chart) for chart in answer["charts"])
    _keep(folder, [chart.name for chart in made])
    pictures = tuple((chart.title, f"{FOLDER}/{chart.name}.png") for chart in made)
    return Drawn(made, answer["script"], pictures)


def _keep(folder: Path, names: Any) -> None:
    """Deletes pictures of ours other than `names`; what else lies in the folder is not ours."""
    for name in set(NAMES) - set(names):
        (folder / FOLDER / f"{name}.png").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        (folder / FOLDER).rmdir()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The worker: writes the pictures; the page's charts and script."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    folder = Path(request["folder"]) / FOLDER
    folder.mkdir(exist_ok=True)
    made = charts(request["report"])
    for chart in made:
        assert chart.name in NAMES, chart.name
        png = vl_convert.vegalite_to_png(picture(chart), vl_version=version, scale=_SCALE, allowed_base_urls=[])
        replace(folder / f"{chart.name}.png", png)
    return {"charts": [dataclasses.asdict(chart) for chart in made], "script": _script(version)}


def _script(version: str) -> str:
    """Vega, Vega-Lite and Vega-Embed in one script without imports; from the cache where it lies there."""
    import vl_convert

    library = importlib.metadata.version("vl-convert-python")
    path = cache_dir() / f"vega-lite-{version}-{library}.js"
    with contextlib.suppress(OSError, ValueError):  # not there, or damaged: made again
        said, _, script = path.read_text(encoding="utf-8").partition("\n")
        if said == f"// {hashlib.sha256(script.encode()).hexdigest()}":
            return script
    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs two seconds each time
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, f"// {hashlib.sha256(script.encode()).hexdigest()}\n{script}".encode(), shared=True)
    return script


if __name__ == "__main__":
    raise SystemExit(serve(answer))
