"""The charts of speed and memory: tokens per second against batch, latency against context, what memory is made of."""

from collections.abc import Callable
from typing import Any

from compress.evaluation.marks import Chart, both, datum, divided, lines
from compress.evaluation.report import Report
from compress.evaluation.rows import SPECS, Group, groups
from compress.evaluation.text import show_bytes

_PARTS = ("weights", "keys and values", "everything else")


def prefill(report: Report) -> Chart | None:
    """Prefill speed against batch, a line for each context."""
    return _by_batch(report, "prefill_tok_s", "Prefill speed by batch, tok/s")


def decode(report: Report) -> Chart | None:
    """Decode speed against batch, a line for each context."""
    return _by_batch(report, "decode_tok_s", "Decode speed by batch, tok/s")


def ttft(report: Report) -> Chart | None:
    """Time to the first token against context, a line for each batch."""
    caption = "Median time to the first token of the whole batch; the thin line is the range over repeats."
    return _by_context(report, "ttft_s", "Time to first token by context, ms", caption)


def itl(report: Report) -> Chart | None:
    """Time between tokens against context, a line for each batch."""
    caption = "Median time between tokens; the thin line is the 10th to 90th percentile of the steps."
    return _by_context(report, "itl_s", "Time between tokens by context, ms", caption)


def _by_batch(report: Report, metric: str, title: str) -> Chart | None:
    caption = "Tokens per second of the whole batch, its prompts as long as the line says; the thin line is the range."
    values = _points(report, metric, "batch", lambda where: f"{where['context']} tokens")
    return lines(metric.removesuffix("_tok_s"), title, caption, values, x="batch")


def _by_context(report: Report, metric: str, title: str, caption: str) -> Chart | None:
    values = _points(report, metric, "context", lambda where: f"batch {where['batch']}", 1000)
    return lines(metric.removesuffix("_s"), title, caption, values, x="context, tokens")


def _points(
    report: Report, metric: str, x: str, series: Callable[[dict[str, Any]], str], factor: float = 1
) -> list[dict[str, Any]]:
    """The values of a metric, with the condition that stands on the axis and the name of their line."""
    found = []
    for group in groups(report, SPECS[metric]):
        where = next(iter(group.rows.values()))["conditions"]
        if not all(isinstance(where.get(key), int) for key in ("batch", "context")):
            continue
        other = group.where.partition(", ")[2]
        name = ", ".join(filter(None, [series(where), other]))
        found += [
            datum(group.rows[item["subject"]], SPECS[metric], group.where, item["subject"], factor)
            | {"x": where[x], "series": name}
            for item in both(group, SPECS[metric], label=group.where)
        ]
    return sorted(found, key=lambda item: item["x"])


def memory(report: Report) -> Chart | None:
    """The highest memory of the measuring process, in parts that lie upon each other."""
    values = []
    for group in groups(report, SPECS["peak_memory_bytes"]):
        for subject in ("base", "artifact"):
            values += _shares(report, group, subject)
    caption = (
        "The highest memory of the process that ran it: weights, second copies included; keys and values of the "
        "largest point; and the rest: interpreter, libraries, activations."
    )
    return divided("memory", "Memory while it runs, MB", caption, values, order=_PARTS)


def _shares(report: Report, group: Group, subject: str) -> list[dict[str, Any]]:
    """Weights, the largest cache, and the rest of one subject's peak; nothing where that is not known."""
    known = {
        metric: [row["value"] for row in report["measurements"]
                 if (row["metric"], row["subject"]) == (metric, subject) and row["value"] is not None]
        for metric in ("weight_bytes", "kv_cache_bytes")
    }  # fmt: skip
    peak = group.rows.get(subject, {}).get("value")
    if peak is None or not all(known.values()):
        return []
    sizes = [max(known["weight_bytes"]), max(known["kv_cache_bytes"])]
    sizes.append(max(0, peak - sum(sizes)))
    return [
        {"subject": subject, "part": part, "value": size / 1e6, "order": i, "shown": show_bytes(size)}
        for i, (part, size) in enumerate(zip(_PARTS, sizes, strict=True))
    ]
