"""The charts of a report, from its rows; a chart without rows is not made.

Left out: charts over many artifacts (pareto).
"""

import math
from collections.abc import Sequence
from typing import Any

from compress.evaluation import speed_charts
from compress.evaluation.marks import (
    ARTIFACT,
    INK,
    SOFT,
    ZERO,
    Chart,
    bars,
    both,
    datum,
    differences,
    dots,
    finish,
    legend,
    plot,
    tip,
)
from compress.evaluation.metrics import Row
from compress.evaluation.report import Report
from compress.evaluation.rows import POOLED, SPECS, block_errors, groups, headline, lone
from compress.evaluation.table import by_position, position_label
from compress.evaluation.text import plain, sig3

NAMES = (
    "accuracy", "accuracy_difference", "perplexity", "nll_difference", "size", "memory", "prefill", "decode", "ttft",
    "itl", "block_error", "kld", "position",
)  # fmt: skip
_SMALLEST = 1e-6  # a divergence below this many nats is no divergence: a logarithm has no zero


def charts(report: Report) -> list[Chart]:
    """Every chart that the report has rows for."""
    makers = (
        _accuracy, _accuracy_difference, _perplexity, _nll_difference, _position, _size, speed_charts.memory,
        speed_charts.prefill, speed_charts.decode, speed_charts.ttft, speed_charts.itl, _blocks, _kld,
    )  # fmt: skip
    made = (make(report) for make in makers)
    return [chart for chart in made if chart is not None]


# --- quality ---


def _accuracy(report: Report) -> Chart | None:
    main = headline(report)
    found = [(group, SPECS[metric]) for metric in ("acc", "acc_norm") for group in groups(report, SPECS[metric])
             if main[group.task] == metric]  # fmt: skip
    order = list(main)
    found.sort(key=lambda pair: order.index(pair[0].task))
    values = [item for group, spec in found for item in both(group, spec, label=group.where or group.task)]
    title, caption = "Accuracy by task", "Share of documents answered rightly, with its 95% interval."
    return dots("accuracy", title, caption, values, form=".0%")


def _accuracy_difference(report: Report) -> Chart | None:
    found = groups(report, SPECS["acc_delta"])
    found.sort(key=lambda group: group.task == POOLED)
    margin = _margin(report, "accuracy")
    caption = (
        "Artifact minus base on the same documents, in percentage points, with the 95% interval of the paired "
        "difference. Right of zero the artifact is better."
    )
    title = "Accuracy difference, pp"
    return differences("accuracy_difference", title, caption + _margin_words(margin), found,
                       spec=SPECS["acc_delta"], margin=-100 * margin if margin else None, factor=100)  # fmt: skip


def _perplexity(report: Report) -> Chart | None:
    spec = SPECS["perplexity"]
    values = [item for group in groups(report, spec) for item in both(group, spec, label=group.where or group.task)]
    caption = "Perplexity of a token on each text; lower is better."
    if not lone(report) and any(item["low"] != item["high"] for item in values):
        caption += " The intervals are each model's own; the difference on the same tokens is known much better."
    return dots("perplexity", "Perplexity", caption, values, form=",.4~g")


def _nll_difference(report: Report) -> Chart | None:
    margin = _margin(report, "perplexity")
    caption = (
        "Artifact minus base: negative log-likelihood of a token, in nats, on the same tokens, with the 95% interval "
        "of the paired difference. Left of zero the artifact is better; 0.05 is a perplexity 5% higher."
    )
    title = "Log of the perplexity ratio, nats"
    return differences("nll_difference", title, caption + _margin_words(margin), groups(report, SPECS["nll_delta"]),
                       spec=SPECS["nll_delta"], margin=margin, factor=1)  # fmt: skip


def _position(report: Report) -> Chart | None:
    import altair as alt

    values = [
        datum(part | {"value": part["nats"]}, SPECS["nll_delta"], group.where or group.task, "pair")
        | {"positions": position_label(part), "from": part["from"]}
        for group in groups(report, SPECS["nll_delta"]) for part in by_position(group.rows.get("pair"))
    ]  # fmt: skip
    values.sort(key=lambda value: value["from"])  # the last classes of windows of other lengths differ
    if len({value["value"] for value in values}) < 2:
        return None  # nothing, or nothing to see
    several = len({value["label"] for value in values}) > 1
    x = alt.X("positions:O", sort=None, title="position in the window").axis(labelAngle=0, labelOverlap="parity")
    offset = alt.XOffset("label:N", sort=None).scale(padding=2)
    base = plot(values).encode(x=x, xOffset=offset)
    ends = _domain(values)
    scale = alt.Scale(domain=ends, nice=False)
    nats = alt.Y("value:Q", title="nats").scale(scale).axis(format="+.2~g", tickCount=5, labelExpr=ZERO)
    ranges = base.mark_rule(color=ARTIFACT, strokeWidth=2, opacity=0.55, clip=True).encode(
        y=alt.Y("low:Q", title="nats"), y2="high:Q"
    )
    shape = alt.Shape("label:N", sort=None, title=None).legend(legend() if several else None)
    fields = {"label": "text", "positions": "positions", "shown": "nats", "range": "range", "n": "n"}
    tips = [tip(field, title) for field, title in fields.items()]
    points = base.mark_point(filled=True, color=ARTIFACT, size=60, opacity=1).encode(y=nats, shape=shape, tooltip=tips)
    zero = plot([{"value": 0}]).mark_rule(color=SOFT, strokeWidth=1.2).encode(y="value:Q")
    caption = (
        "Artifact minus base: negative log-likelihood of a token by how many tokens of its window a model has seen, "
        "with the 95% interval over windows. What rises to the right is lost on long contexts."
    )
    if any(value["low"] < ends[0] or value["high"] > ends[1] for value in values):
        caption += " Intervals that are far wider than the points are apart are cut off."
    title = "Log of the perplexity ratio by position, nats"
    return Chart("position", title, caption, finish(zero + ranges + points, 210))


def _domain(values: Sequence[dict[str, Any]]) -> list[float]:
    """The ends of an axis: all points, zero, and intervals as far as twice the points' spread beyond them."""
    bottom, top = min(0, *(value["value"] for value in values)), max(0, *(value["value"] for value in values))
    room = 2 * (top - bottom)
    lows, highs = (value["low"] for value in values), (value["high"] for value in values)
    low, high = max(min(lows), bottom - room), min(max(highs), top + room)
    return [min(bottom, low) - 0.02 * room, max(top, high) + 0.02 * room]


def _margin_words(margin: float | None) -> str:
    return " The dashed line is the margin of the verdict." if margin else ""


def _margin(report: Report, basis: str) -> float | None:
    verdict = report["verdict"] or {}
    return verdict["delta"] if verdict.get("basis") == basis and verdict["delta"] else None


# --- cost ---


def _size(report: Report) -> Chart | None:
    values = []
    for metric, label in (("size_bytes", "checkpoint"), ("peak_memory_bytes", "peak memory")):
        for group in groups(report, SPECS[metric]):
            values += both(group, SPECS[metric], label=", ".join(filter(None, [label, group.where])))
    top = max((item["high"] for item in values), default=0)
    unit, size = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if top >= size), ("B", 1))
    values = [item | {key: item[key] / size for key in ("value", "low", "high")} for item in values]
    caption = "The checkpoint on disk, and the highest memory of the process that ran it."
    return bars("size", "Size and memory", caption, values, unit=unit)


# --- where it comes from ---


def _blocks(report: Report) -> Chart | None:
    import altair as alt

    rows = block_errors(report)
    if not rows:
        return None
    names = _short_names([row["task"] for row in rows])
    values = [{"name": plain(row["task"]), "label": plain(name), "value": row["value"], "shown": sig3(row["value"])}
              for row, name in zip(rows, names, strict=True)]  # fmt: skip
    width = {"size": 24} if len(rows) <= 12 else {}  # one block is no wall
    chart = (
        plot(values)
        .mark_bar(color=ARTIFACT, cornerRadiusEnd=1, **width)
        .encode(
            x=alt.X("label:N", sort=None, title="block")
            .axis(labelAngle=0, labelLimit=90, labelOverlap="parity", labelSeparation=4)
            .scale(paddingInner=0.2, paddingOuter=0.1),
            y=alt.Y("value:Q", title=None).axis(format=".2~g", tickCount=5),
            tooltip=[tip("name", "block"), tip("shown", "relative error")],
        )
    )
    caption = (
        "Relative error of each block's output on held-out text. Both models ran from the first block on: a block's "
        "error includes what came before it."
    )
    title = "Error by block"
    return Chart("block_error", title, caption, finish(chart, 190))


def _kld(report: Report) -> Chart | None:
    import altair as alt

    found = [(plain(g.where or g.task), curve) for g in groups(report, SPECS["kld_mean"])
             if (curve := _curve(g.rows.get("pair")))]  # fmt: skip
    if not found:
        return None
    floor = max(_SMALLEST, min(curve[50] for _, curve in found) / 1000)  # few positions below: three decades are enough
    values: list[dict[str, Any]] = [
              {"label": label, "percentile": p, "value": max(value, floor), "shown": sig3(value)}
              for label, curve in found for p, value in enumerate(curve)]  # fmt: skip
    top = max(item["value"] for item in values)
    tens = [10.0**power for power in range(math.ceil(math.log10(floor)), math.floor(math.log10(top)) + 1)]
    x = alt.X("percentile:Q", title="percentile of positions").axis(tickCount=10, grid=False).scale(domain=[0, 100])
    y = alt.Y("value:Q", title="nats").scale(type="log", nice=False).axis(format="~g", values=tens)
    several = len(found) > 1
    dash = alt.StrokeDash("label:N", sort=None, title=None).legend(legend() if several else None)
    curves = plot(values).mark_line(color=ARTIFACT, strokeWidth=2).encode(x=x, y=y, strokeDash=dash)
    tips = [tip("label", "text"), tip("percentile", "percentile"), tip("shown", "KLD, nats")]
    hover = plot(values).mark_point(opacity=0, size=90).encode(x=x, y=y, tooltip=tips)
    names = {50: "median", 90: "p90", 99: "p99"}
    marked = [item | {"text": f"{names[p]} {item['shown']}"} for p, item in enumerate(values[:101]) if p in names]
    marks = plot(marked).encode(x=x, y=y)
    points = marks.mark_point(color=ARTIFACT, fill=ARTIFACT, size=36, opacity=1)
    texts = marks.mark_text(color=INK, align="right", dx=-8, dy=-7, fontSize=11.5).encode(text="text:N")
    caption = (
        "KL divergence of the artifact's predictions from the base's at each position, sorted, on a logarithmic axis"
        + (f"; what is below {floor:.1g} is drawn there." if min(min(curve) for _, curve in found) < floor else ".")
    )
    title = "Distribution of the divergence"
    return Chart("kld", title, caption, finish(curves + hover + points + texts, 240))


def _curve(row: Row | None) -> list[float] | None:
    """The 101 percentiles of a row, where it has them and there is something to see."""
    curve = row["context"].get("percentiles") if row else None
    if not isinstance(curve, list) or len(curve) != 101 or not all(isinstance(v, int | float) for v in curve):
        return None
    return curve if max(curve) > _SMALLEST else None


def _short_names(names: Sequence[str]) -> list[str]:
    """The part of dotted names that tells them apart: model.layers.3 → 3. All of it where none does."""
    split = [name.split(".") for name in names]
    same = {len(parts) for parts in split} == {len(split[0])}
    keep = [i for i in range(len(split[0])) if len({parts[i] for parts in split}) > 1] if same else []
    if len(names) == 1 and split[0][-1].isdecimal():
        keep = [len(split[0]) - 1]
    return [".".join(parts[i] for i in keep) if keep else ".".join(parts) for parts in split]
