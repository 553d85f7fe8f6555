"""The model card (README.md of the artifact) by the hub's conventions.

The idea: the front matter is what the hub's pages and filters read: the base and how this relates to it, the
license, tags, and the results as a `model-index`; the text below is what a person reads first. Both come from
the report; a result without a number is left out. A base that is a local folder is no hub name: the front
matter leaves it out, and the text shows its last part only.

Names, notes and texts come from strangers' checkpoints: Markdown is escaped by `markdown`, the front matter by
YAML, code fences by being longer than what they hold.

Left out: what only the author can know: intended use, limits, languages, training data. The base's own card
lies beside this one.
"""

import html as html_module
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.evaluation.figures import badge, figures
from compress.evaluation.metrics import Row
from compress.evaluation.page import facts
from compress.evaluation.report import Report
from compress.evaluation.rows import SPECS, conditions, groups, lone
from compress.evaluation.table import summary_lines
from compress.evaluation.text import plain
from compress.formats.compressed_tensors import EXPANDED_ONLY

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARKS = re.compile(r"([\\`*_{}\[\]()#!|~$]|^[+-])")
_RESULTS = {"acc": "accuracy", "acc_norm": "accuracy, normalised", "perplexity": "perplexity",
            "word_perplexity": "perplexity of a word"}  # fmt: skip
_SHARED = (
    "hardware", "backend", "runtime", "device", "threads", "dtype", "num fewshot", "weights", "torch", "transformers",
)  # fmt: skip


def markdown(text: str) -> str:
    """`text` as Markdown that shows it: no markup, no HTML, no line break."""
    return html_module.escape(_MARKS.sub(r"\\\1", plain(text)), quote=False)


def fence(text: str, language: str = "") -> str:
    """A code block that `text` cannot close: its fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def card(
    report: Report,
    recipe_name: str,
    recipe_yaml: str | None,
    base_license: str | None,
    pictures: Sequence[tuple[str, str]] = (),
) -> str:
    """The card.

    Args:
        recipe_yaml: None leaves the recipe out.
        base_license: as the hub names it. "other" takes its name and link from the report's base
            (`license_name`, `license_link`), else the link is the base's own page.
        pictures: title and path, relative to the card, of charts that exist (`Drawn.pictures`).
    """
    import jinja2
    import yaml

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,  # Markdown: every untrusted word passes the filter `md` or `fence`
    )  # fmt: skip
    environment.filters |= {"md": markdown, "fence": fence}
    front = yaml.safe_dump(_front(report, base_license), sort_keys=False, allow_unicode=True)
    name, base = report["artifact"]["name"], report["base"]["name"]
    known = dict(conditions(report))
    return environment.get_template("card.md.j2").render(
        front=front, name=name, base=_shown_base(base), lone=lone(report), facts=facts(report)[not lone(report) :],
        figures=figures(report), badge=badge(report), verdict=report["verdict"], lines=summary_lines(report),
        shared=[(key, known[key]) for key in _SHARED if key in known], recipe_name=recipe_name,
        recipe_yaml=recipe_yaml, notes=report["artifact"].get("notes") or [], pictures=pictures,
        packages=_packages(report), load=_load(report), serve=f"vllm serve {shlex.quote(plain(name))}",
        generates=bool(groups(report, SPECS["greedy_agreement"])), vllm=reads_vllm(report),
        llama_cpp=_llama_cpp(report),
    )  # fmt: skip


def _shown_base(base: str | None) -> str:
    return "" if base is None else base if _HUB_NAME.fullmatch(base) else Path(base).name


def _front(report: Report, base_license: str | None) -> dict[str, Any]:
    """The front matter; keys in the order in which the hub's own cards have them."""
    front: dict[str, Any] = {}
    base = report["base"]["name"]
    if base is not None and _HUB_NAME.fullmatch(base):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    library = "gguf" if report["artifact"].get("format") == "gguf" else "transformers"
    front |= {"library_name": library, **_license(report, base_license), "tags": _tags(report)}
    front["pipeline_tag"] = "text-generation"
    results = _results(report)
    if results:
        front["model-index"] = [{"name": report["artifact"]["name"], "results": results}]
    return front


def _license(report: Report, base_license: str | None) -> dict[str, str]:
    """The license is the base's; the hub wants a name and a link for one that it does not know."""
    if not base_license:
        return {}
    known = re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", base_license) is not None
    found = {"license": base_license} if known else {"license": "other", "license_name": plain(base_license)}
    base = report["base"]
    if found["license"] == "other":
        if base.get("license_name"):
            found["license_name"] = str(base["license_name"])
        if base.get("license_link"):
            found["license_link"] = str(base["license_link"])
        elif base["name"] is not None and _HUB_NAME.fullmatch(base["name"]):
            found["license_link"] = f"https://huggingface.co/{base['name']}"
    return found


def _tags(report: Report) -> list[str]:
    """What people filter by: the method, the widths of the weights ("4-bit"), the format."""
    artifact = report["artifact"]
    schemes = _list(artifact.get("scheme"))
    bits = re.findall(r"(?:int|fp|float|W)(\d+)", " ".join(schemes))
    widths = [f"{width}-bit" for width in dict.fromkeys(bits)]
    tags = ["compress", *(["quantized"] if widths else []), *_list(artifact.get("method")), *widths]
    return list(dict.fromkeys(tags + _list(artifact.get("format"))))


def _list(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else [str(part) for part in value]


def _results(report: Report) -> list[dict[str, Any]]:
    """The artifact's accuracies and perplexities, an entry for each task; only what is a number."""
    found: dict[str, dict[str, Any]] = {}
    for metric, name in _RESULTS.items():
        for group in groups(report, SPECS[metric]):
            row = group.rows.get("artifact")
            if row is not None and row["value"] is not None:
                label = group.where or group.task
                entry = found.setdefault(label, _entry(label, row))
                entry["metrics"].append({"type": metric, "value": round(row["value"], 6), "name": name})
    return list(found.values())


def _entry(label: str, row: Row) -> dict[str, Any]:
    dataset = row["context"].get("dataset", row["task"])
    return {
        "task": {"type": "text-generation", "name": "Text Generation"},
        "dataset": {"name": label, "type": str(dataset)},
        "metrics": [],
    }


def reads_vllm(report: Report) -> bool:
    """Whether vLLM reads the artifact, as its `loaders` say."""
    loaders = _list(report["artifact"].get("loaders"))
    return report["artifact"].get("format") == "dense" or any("vllm" in loader.lower() for loader in loaders)


# What transformers needs for a format.
_PACKAGES = {"compressed-tensors": ("compressed-tensors",), "gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",)}


def _packages(report: Report) -> str:
    return " ".join(["transformers", *_PACKAGES.get(str(report["artifact"].get("format")), ())])


def _llama_cpp(report: Report) -> str | None:
    """How llama.cpp and Ollama run a GGUF file; None for any other format."""
    if report["artifact"].get("format") != "gguf":
        return None
    name = shlex.quote(plain(report["artifact"]["name"]).lower())
    return "\n".join([
        'llama-cli -m model.gguf -no-cnv -p "The river rises" -n 32', "",
        'echo "FROM ./model.gguf" > Modelfile', f"ollama create {name} -f Modelfile",
        f'ollama run {name} "The river rises"',
    ])  # fmt: skip


def _load(report: Report) -> str:
    """How transformers loads it; some it must be told to expand."""
    artifact = report["artifact"]
    asymmetric = "asym" in " ".join(_list(artifact.get("scheme")))
    alone = report["base"].get("architecture") in EXPANDED_ONLY
    expand = artifact.get("format") == "compressed-tensors" and (asymmetric or alone)
    config = ", CompressedTensorsConfig" if expand else ""
    extra = ", quantization_config=CompressedTensorsConfig(dequantize=True)" if expand else ""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer{config}

name = {json.dumps(artifact["name"])}  # the folder of this card, or its name on a hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto"{extra})
inputs = tokenizer("The river rises", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""
