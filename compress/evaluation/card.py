"""The model card (README.md of the artifact) by the hub's conventions."""

import html as html_module
import json
import re
import shlex
from pathlib import Path
from typing import Any

from compress.evaluation.page import facts
from compress.evaluation.report import Report
from compress.evaluation.rows import conditions
from compress.evaluation.table import summary_lines
from compress.evaluation.text import plain

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARKS = re.compile(r"([\\`*_{}\[\]()#!|~$]|^[+-])")


def markdown(text: str) -> str:
    """`text` as Markdown that shows it: no markup, no HTML, no line break."""
    return html_module.escape(_MARKS.sub(r"\\\1", plain(text)), quote=False)


def fence(text: str, language: str = "") -> str:
    """A code block that `text` cannot close: its fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def card(report: Report, recipe_name: str, recipe_yaml: str, base_license: str | None) -> str:
    """The model card (README.md): front matter by the hub's conventions, how to load, the table, the recipe.

    A base that is a local folder is no hub name: the front matter leaves it out, and the text shows its last
    part only.
    """
    import jinja2
    import yaml

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,  # Markdown: every untrusted word passes the filter `md` or `fence`
    )  # fmt: skip
    environment.filters |= {"md": markdown, "fence": fence, "json": json.dumps}
    front = yaml.safe_dump(_front(report, base_license), sort_keys=False, allow_unicode=True)
    name, base = report["artifact"]["name"], report["base"]["name"]
    return environment.get_template("card.md.j2").render(
        front=front, name=name, base=base if _HUB_NAME.fullmatch(base) else Path(base).name,
        facts=facts(report)[2:], verdict=report["verdict"], lines=summary_lines(report),
        shared=_shared_conditions(report), recipe_name=recipe_name, recipe_yaml=recipe_yaml,
        notes=report["artifact"].get("notes") or [], serve=f"vllm serve {_shell(name)}",
    )  # fmt: skip


def _front(report: Report, base_license: str | None) -> dict[str, Any]:
    front: dict[str, Any] = {}
    base = report["base"]["name"]
    if _HUB_NAME.fullmatch(base):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front["library_name"] = "transformers"
    if base_license:
        front["license"] = base_license
    tags = ["compress"]
    for key, default in (("method", None), ("scheme", None), ("format", "compressed-tensors")):
        value = report["artifact"].get(key) or default
        tags += [str(part) for part in (value if isinstance(value, list | tuple) else [value]) if part]
    return front | {"tags": list(dict.fromkeys(tags)), "pipeline_tag": "text-generation"}


def _shared_conditions(report: Report) -> list[tuple[str, str]]:
    keys = ("hardware", "runtime", "device", "threads", "dtype", "weights", "torch", "transformers")
    known = dict(conditions(report))
    return [(key, known[key]) for key in keys if key in known]


def _shell(text: str) -> str:
    return shlex.quote(plain(text))
