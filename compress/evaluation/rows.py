"""Which rows of a report belong together, and what a reader calls them.

The idea: rows that share metric, task and conditions are one group; its label is the metric, its point of the
grid, and whatever else tells it from the metric's other groups. Everything that a reader sees (the table in the
terminal, the page, the card, the charts) takes its groups from here, so they agree on what is compared with what.

Left out: metrics that no `Spec` names. The document keeps their rows.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compress.evaluation.metrics import Row
from compress.evaluation.report import Report
from compress.evaluation.suite import BINARY
from compress.evaluation.text import (
    show_bytes,
    show_change,
    show_difference,
    show_percent,
    show_points,
    show_ratio,
    show_seconds,
    sig3,
    signed,
)

POOLED = "pooled"  # the task that stands for all tasks


@dataclass(frozen=True)
class Spec:
    """How a metric stands in a table. `pair`: one value compares both; `always`: a line even unmeasured."""

    metric: str
    label: str
    show: Callable[[float], str] = sig3
    change: Callable[[float, float], str] = show_ratio
    pair: bool = False
    always: bool = True


ACCURACY = (
    Spec("acc", "accuracy", show_percent, change=show_difference, always=False),
    Spec("acc_norm", "accuracy, normalised", show_percent, change=show_difference, always=False),
    Spec("acc_delta", "accuracy difference", show_points, pair=True, always=False),
    Spec("flips", "answers that changed", show_percent, pair=True, always=False),
    Spec("mcnemar_p", "McNemar's p", pair=True, always=False),
    Spec("smallest_difference", "smallest difference seen 80% of the time", show_points, pair=True, always=False),
    Spec("recovery", "recovery", show_percent, pair=True, always=False),
)
LIKELIHOOD = (
    Spec("perplexity", "perplexity", change=show_change),
    Spec("word_perplexity", "perplexity of a word", change=show_change, always=False),
    Spec("target_perplexity", "perplexity of an answer", change=show_change, always=False),
    Spec("nll_delta", "log of perplexity ratio", signed(sig3), pair=True, always=False),
    Spec("kld_mean", "KLD mean, nats", pair=True),
    Spec("kld_median", "KLD median, nats", pair=True, always=False),
    Spec("kld_p90", "KLD p90, nats", pair=True, always=False),
    Spec("kld_p99", "KLD p99, nats", pair=True),
    Spec("kld_max", "KLD max, nats", pair=True, always=False),
    Spec("top1_agreement", "top-1 agreement", show_percent, pair=True),
    Spec("top5_agreement", "top-5 agreement", show_percent, pair=True, always=False),
    Spec("kld_floor", "KLD of the base from itself, nats", always=False),
    Spec("nonfinite", "positions without finite numbers", pair=True, always=False),
)
GENERATION = (
    Spec("greedy_agreement", "greedy agreement, tokens", pair=True, always=False),
    Spec("greedy_agreement_median", "greedy agreement, median", pair=True, always=False),
    Spec("repetition", "repeated 4-grams", show_percent, change=show_difference, always=False),
    Spec("endings", "outputs that end", show_percent, change=show_difference, always=False),
)
COST = (
    Spec("size_bytes", "checkpoint", show_bytes),
    Spec("bpw", "bits per quantized weight"),
    Spec("kv_bytes_per_token", "key-value cache of a token", show_bytes, always=False),
    Spec("prefill_tok_s", "prefill tok/s", always=False),
    Spec("decode_tok_s", "decode tok/s", always=False),
    Spec("ttft_s", "time to first token", show_seconds, always=False),
    Spec("itl_s", "time between tokens", show_seconds, always=False),
    Spec("weight_bytes", "weights in memory", show_bytes, always=False),
    Spec("peak_memory_bytes", "peak memory", show_bytes, always=False),
    Spec("load_s", "load time", show_seconds, always=False),
    Spec("compress_wall_s", "time to compress", show_seconds, always=False),
    Spec("compress_cpu_s", "CPU time to compress", show_seconds, always=False),
    Spec("compress_peak_bytes", "peak memory to compress", show_bytes, always=False),
)
LATENCY = (  # beside `ttft_s` and `itl_s`, the medians
    Spec("ttft_p90_s", "to first token, p90", show_seconds, always=False),
    Spec("ttft_p99_s", "p99", show_seconds, always=False),
    Spec("itl_p90_s", "between tokens, p90", show_seconds, always=False),
    Spec("itl_p99_s", "p99", show_seconds, always=False),
)
LIMITS = (
    Spec("mfu", "prefill, of the arithmetic", show_percent, always=False),
    Spec("mbu", "decode, of the bandwidth", show_percent, always=False),
    Spec("ceiling_tok_s", "decode, at most tok/s", always=False),
    Spec("kv_cache_bytes", "keys and values", show_bytes, always=False),
    Spec("energy_j", "energy, J", always=False),
)
DIVERGENCE = (
    "kld_mean", "kld_median", "kld_p90", "kld_p99", "kld_max", "top1_agreement", "top5_agreement",
)  # fmt: skip
SPECS = {spec.metric: spec for spec in (*ACCURACY, *LIKELIHOOD, *GENERATION, *COST, *LATENCY, *LIMITS)}


@dataclass(frozen=True)
class Group:
    """Rows of one metric, task and conditions, by subject, and what to call them."""

    label: str
    where: str  # the label without the metric's name
    task: str
    rows: dict[str, Row]


def lone(report: Report) -> bool:
    """Whether the report speaks of one checkpoint that was compared with nothing."""
    return report["base"]["name"] is None


def groups(report: Report, spec: Spec) -> list[Group]:
    """The metric's rows, base and artifact matched; held-out rows come first, else the document's order."""
    rows = [row for row in report["measurements"] if row["metric"] == spec.metric]
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["task"] != "heldout"):
        found.setdefault(place(row), {})[row["subject"]] = row
    wheres = _wheres(spec, [next(iter(group.values())) for group in found.values()])
    return [
        Group(", ".join(filter(None, [spec.label, where])), where, next(iter(group.values()))["task"], group)
        for where, group in zip(wheres, found.values(), strict=True)
    ]


def place(row: Row) -> str:
    """What rows must share to be comparable: the task and the conditions."""
    return json.dumps([row["task"], row["conditions"]], sort_keys=True)


def _wheres(spec: Spec, rows: list[Row]) -> list[str]:
    """For each row its point, its task, and whatever else tells these rows apart."""
    tasks = {row["task"] for row in rows}
    values: dict[str, set[str]] = {}
    for row in rows:
        for key, value in row["conditions"].items():
            values.setdefault(key, set()).add(str(value))
    point = ("batch", "context", "output")
    telling = [key for key, seen in values.items() if len(seen) > 1 and key not in point]
    if len(tasks) == len(rows):
        telling = []  # the task tells them apart already
    found = []
    for row in rows:
        where = row["conditions"]
        parts = []
        if all(where.get(key) is not None for key in point):
            parts.append("{batch}×{context}+{output}".format(**where))
        if len(tasks) > 1 or (spec not in (*COST, *LATENCY, *LIMITS) and row["task"] != "heldout"):
            parts.append(row["task"])
        found.append(", ".join([*parts, *(f"{key} {where[key]}" for key in telling if key in where)]))
    return found


def headline(report: Report) -> dict[str, str]:
    """For each task of questions the metric that counts, `acc` or `acc_norm`: as the suite said, else the first."""
    chosen: dict[str, str] = {}
    for row in report["measurements"]:
        if row["metric"] in BINARY and (row["context"].get("counts") or row["task"] not in chosen):
            chosen[row["task"]] = row["metric"]
    return chosen


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts "layers.2" before "layers.10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def block_errors(report: Report) -> list[Row]:
    """The error of each block's output, in the model's order."""
    rows = [row for row in report["measurements"] if row["metric"] == "block_error" and row["value"] is not None]
    return sorted(rows, key=lambda row: natural(row["task"]))


def conditions(report: Report) -> list[tuple[str, str]]:
    """Every condition and the values it took, and from the context what a reader should know."""
    seen: dict[str, dict[str, None]] = {}
    for row in report["measurements"]:
        parts = [*row["conditions"].items()]
        parts += [(key, row["context"][key]) for key in ("weights", "time", "load_average", "cpu_share")
                  if key in row["context"]]  # fmt: skip
        for key, value in parts:
            text = ", ".join(map(_number, value)) if isinstance(value, list) else _number(value)
            seen.setdefault(str(key), {})[text] = None
    return [(key.replace("_", " "), "; ".join(values)) for key, values in seen.items()]


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
