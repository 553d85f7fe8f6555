"""The kinds of chart that reports are made of, as Vega-Lite specs by Altair.

The idea: the page and the card show the same charts. The page's colours are its CSS variables, so that it turns
dark with the reader's machine without drawing anew, and its width is the column's; `picture` puts fixed ones
in their place. Base is grey and a diamond, the artifact blue and a disc (Okabe and
Ito's blue against a neutral): they differ in lightness and shape too, whatever the reader's eyes or printer.

Names come from strangers. They stand in the charts' data only, without control characters (no SVG may hold
them): never in a field's name, a title or an expression, which Vega would interpret.

Left out: zooming. A tooltip has the numbers, and the tables have them all.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compress.evaluation.metrics import Row
from compress.evaluation.rows import POOLED, Group, Spec
from compress.evaluation.table import show_range, shown
from compress.evaluation.text import plain

INK, SOFT, GRID, BASE, ARTIFACT, PAPER = (
    f"var(--{name})" for name in ("ink", "soft", "line", "base", "accent", "paper")
)
_PICTURE = {INK: "#1b1f24", SOFT: "#59636e", GRID: "#e3e6ea", BASE: "#8a929c", ARTIFACT: "#0072b2", PAPER: "#ffffff"}
_PICTURE_WIDTH = 680
ZERO = "datum.value === 0 ? '0' : datum.label"  # labels of an axis with signs: zero has none
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Chart:
    """A chart: its file's name, what it shows, how to read it, and its Vega-Lite spec."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


# --- the kinds of chart ---


def both(group: Group, spec: Spec, *, label: str) -> list[dict[str, Any]]:
    """The values of base and artifact in a group, as a chart's data."""
    return [datum(group.rows[subject], spec, label, subject) for subject in ("base", "artifact")
            if group.rows.get(subject, {}).get("value") is not None]  # fmt: skip


def datum(row: Row, spec: Spec, label: str, subject: str, factor: float = 1) -> dict[str, Any]:
    """A value with its range, as a chart's data."""
    ends = [row["value"] if row[key] is None else row[key] for key in ("low", "high")]
    return {
        "label": plain(label), "subject": subject, "value": factor * row["value"], "low": factor * ends[0],
        "high": factor * ends[1], "shown": shown(spec, row["value"]), "range": show_range(spec, row) or "–",
        "n": "–" if row["n"] is None else f"{row['n']:,}",
    }  # fmt: skip


def dots(name: str, title: str, caption: str, values: list[dict[str, Any]], *, form: str) -> Chart | None:
    """Both models' values, a line each: a disc and a diamond with their intervals."""
    import altair as alt

    if not values:
        return None
    x = alt.X("value:Q", title=None).scale(zero=False, padding=10).axis(format=form, tickCount=6)
    base = plot(values).encode(y=_labels(), yOffset=_offset(values), color=_color(values))
    ranges = base.mark_rule(strokeWidth=2, strokeCap="round").encode(x=alt.X("low:Q", title=None), x2="high:Q")
    seen = _subjects(values)
    shapes = {"base": "diamond", "artifact": "circle"}
    shape = alt.Shape("subject:N", title=None).legend(_legend_of(values))
    shape = shape.scale(domain=seen, range=[shapes[subject] for subject in seen])
    points = base.mark_point(filled=True, size=64, opacity=1).encode(x=x, shape=shape, tooltip=_tips())
    return Chart(name, title, caption, finish(ranges + points, _height(values, 30)))


def differences(
    name: str, title: str, caption: str, found: Sequence[Group], *, spec: Spec, margin: float | None,
    factor: float,
) -> Chart | None:  # fmt: skip
    """Differences with their intervals around zero; what stands for all tasks is bolder."""
    import altair as alt

    values = [datum(group.rows["pair"], spec, group.where or group.task, "pair", factor) | {"all": group.task == POOLED}
              for group in found if group.rows.get("pair", {}).get("value") is not None]  # fmt: skip
    if not values:
        return None
    axis = alt.X("value:Q", title=None).axis(format="+.3~g", tickCount=6, labelExpr=ZERO)
    base = plot(values).encode(y=_labels())
    width = alt.condition("datum.all", alt.value(3.5), alt.value(2))
    size = alt.condition("datum.all", alt.value(110), alt.value(60))
    layers = [_line_at(0, SOFT, [])]
    layers += [] if margin is None else [_line_at(margin, SOFT, [4, 4])]
    layers += [
        base.mark_rule(color=ARTIFACT, strokeCap="round").encode(
            x=alt.X("low:Q", title=None), x2="high:Q", strokeWidth=width
        ),
        base.mark_point(filled=True, color=ARTIFACT, opacity=1).encode(x=axis, size=size, tooltip=_tips(False)),
    ]
    return Chart(name, title, caption, finish(alt.layer(*layers), _height(values, 30)))


def _line_at(value: float, color: str, dash: list[int]) -> Any:
    return plot([{"value": value}]).mark_rule(color=color, strokeDash=dash, strokeWidth=1.2).encode(x="value:Q")


def bars(name: str, title: str, caption: str, values: list[dict[str, Any]], *, unit: str) -> Chart | None:
    """Bars from zero with the range that was seen, and the value at their end."""
    import altair as alt

    if not values:
        return None
    axis = alt.X("value:Q", title=unit).axis(format=",.4~f", tickCount=6)
    axis = axis.scale(domain=[0, 1.16 * max(item["high"] for item in values) or 1], nice=False)  # room for the text
    base = plot(values).encode(y=_labels(), yOffset=_offset(values))
    bars = base.mark_bar(cornerRadiusEnd=2).encode(x=axis, color=_color(values), tooltip=_tips())
    ranges = base.mark_rule(color=INK, strokeWidth=1.2).encode(x="low:Q", x2="high:Q")
    texts = base.mark_text(color=SOFT, align="left", dx=6, fontSize=11).encode(x="high:Q", text="shown:N")
    return Chart(name, title, caption, finish(bars + ranges + texts, _height(values, 40)))


def lines(name: str, title: str, caption: str, values: list[dict[str, Any]], *, x: str) -> Chart | None:
    """Lines over a few numbers `x`, one for each `series` and subject, with the ranges that were seen."""
    import altair as alt

    if not values:
        return None
    top = 1.05 * max(item["high"] for item in values) or 1
    axis = alt.Y("value:Q", title=None).scale(domain=[0, top], nice=False).axis(format=",.4~g", tickCount=5)
    across = alt.X("x:O", title=x).axis(labelAngle=0).scale(type="point", padding=0.5)
    several = len({item["series"] for item in values}) > 1
    names = legend() if several else None
    dash = alt.StrokeDash("series:N", sort=None, title=None).legend(None)
    shape = alt.Shape("series:N", sort=None, title=None).legend(names)
    base = plot(values).encode(x=across, color=_color(values), detail="series:N")
    curves = base.mark_line(strokeWidth=2).encode(y=axis, strokeDash=dash)
    ranges = base.mark_rule(strokeWidth=1.2).encode(y=alt.Y("low:Q", title=None), y2="high:Q")
    points = base.mark_point(filled=True, size=64, opacity=1).encode(y=axis, shape=shape, tooltip=_tips())
    return Chart(name, title, caption, finish(curves + ranges + points, 210))


def divided(name: str, title: str, caption: str, values: list[dict[str, Any]], *, order: Sequence[str]) -> Chart | None:
    """A bar for each subject, made of its parts, paler from part to part."""
    import altair as alt

    if not values:
        return None
    shades = [1.0, 0.6, 0.25][: len(order)]
    named = legend()
    named.symbolFillColor = INK
    tone = alt.Opacity("part:N", title=None).scale(type="ordinal", domain=list(order), range=shades).legend(named)
    subject = alt.Y("subject:N", sort=_subjects(values), title=None).axis(labelColor=INK, labelFontSize=12, grid=False)
    across = alt.X("value:Q", title=None).stack("zero").axis(format=",.4~g", tickCount=6)
    tips = [tip("subject", "model"), tip("part", "what"), tip("shown", "size")]
    color = _color(values).legend(None)
    made = plot(values).mark_bar().encode(x=across, y=subject, color=color, opacity=tone, order="order:O", tooltip=tips)
    return Chart(name, title, caption, finish(made, 40 * len(_subjects(values)) + 8))


# --- what the charts share ---


def plot(values: Sequence[dict[str, Any]]) -> Any:
    """An empty chart of the values."""
    import altair

    data: Any = altair.Data  # untyped there
    return altair.Chart(data(values=list(values)))


def _labels() -> Any:
    import altair as alt

    shorter = "slice(datum.label, 0, 13) + '…' + slice(datum.label, -13)"  # names mostly differ at their ends
    label = f"length(datum.label) > 28 ? {shorter} : datum.label"
    axis = alt.Axis(labelExpr=label, labelLimit=190, labelColor=INK, labelPadding=8, grid=False, labelFontSize=12)
    return alt.Y("label:N", sort=None, title=None).axis(axis).scale(paddingInner=0.25, paddingOuter=0.15)


def _offset(values: Sequence[dict[str, Any]]) -> Any:
    import altair as alt

    return alt.YOffset("subject:N", sort=_subjects(values)).scale(domain=_subjects(values))


def _color(values: Sequence[dict[str, Any]]) -> Any:
    import altair as alt

    seen = _subjects(values)
    colors = {"base": BASE, "artifact": ARTIFACT}
    scale = alt.Scale(domain=seen, range=[colors[subject] for subject in seen])
    return alt.Color("subject:N", title=None).scale(scale).legend(_legend_of(values))


def _subjects(values: Sequence[dict[str, Any]]) -> list[str]:
    return [subject for subject in ("base", "artifact") if any(item["subject"] == subject for item in values)]


def _legend_of(values: Sequence[dict[str, Any]]) -> Any:
    return legend() if len(_subjects(values)) > 1 else None


def legend() -> Any:
    import altair as alt

    return alt.Legend(orient="top", direction="horizontal", labelColor=INK, symbolSize=90, offset=6, labelFontSize=11.5)


def tip(field: str, title: str) -> Any:
    import altair as alt

    return alt.Tooltip(f"{field}:N", title=title)


def _tips(subject: bool = True) -> list[Any]:
    who = [tip("subject", "model")] if subject else []
    return [tip("label", "what"), *who, tip("shown", "value"), tip("range", "range"), tip("n", "n")]


def _height(values: Sequence[dict[str, Any]], step: int) -> int:
    return step * len({item["label"] for item in values}) + 8


def finish(chart: Any, height: int) -> dict[str, Any]:
    """The page's spec of a chart: the column's width, and quiet axes."""
    axis = {
        "domain": False, "ticks": False, "gridColor": GRID, "labelColor": SOFT, "titleColor": SOFT,
        "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelPadding": 6,
    }  # fmt: skip
    made = (
        chart.properties(width="container", height=height)
        .configure(background="transparent", font=_FONT, padding=3)
        .configure_view(stroke=None)
        .configure_axis(**axis)
    )
    spec: dict[str, Any] = made.to_dict()
    del spec["$schema"]  # an address that nothing needs
    return spec


def picture(chart: Chart) -> dict[str, Any]:
    """The spec of a chart that stands alone: fixed colours and width, its title above it."""
    text = json.dumps(chart.spec)
    for variable, color in _PICTURE.items():
        text = text.replace(json.dumps(variable), json.dumps(color))
    spec: dict[str, Any] = json.loads(text)
    title = {"anchor": "start", "color": _PICTURE[INK], "fontSize": 15, "offset": 10}
    changed = {"background": _PICTURE[PAPER], "font": "sans-serif", "padding": 16, "title": title}
    return {**spec, "width": _PICTURE_WIDTH, "title": chart.title, "config": {**spec["config"], **changed}}
