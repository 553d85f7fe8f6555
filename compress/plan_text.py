"""The plan as people read it: rows folded over the layers where they are alike, at most 80 columns."""

import re
import textwrap
from collections.abc import Sequence

from compress.evaluation.text import show_bytes
from compress.plan import Plan
from compress.plan_rows import PlanRow

WIDTH = 80


def folded(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow, int]]:
    """Rows that differ only in the layer's number, as (name with the numbers, one of them, how many)."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        key: tuple[object, ...] = (re.sub(r"\.\d+\.", ".*.", row.name), row.shape, row.scheme, row.method, row.reason)
        groups.setdefault(key, []).append(row)
    found = []
    for key, same in groups.items():
        numbers = [int(m.group(1)) for row in same if (m := re.search(r"\.(\d+)\.", row.name))]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{{{_spans(numbers)}}}"
        found.append((str(key[0]).replace("*", span, 1), same[0], len(same)))
    return found


def _spans(numbers: Sequence[int]) -> str:
    """0,1,2,5 as "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def plan_text(plan: Plan, cost: str = "") -> str:
    """The whole plan as text; `cost` says what the suite takes on this machine."""
    lines = [*textwrap.wrap(f"{plan.recipe} on {plan.model}, written as {plan.format}", WIDTH), ""]
    for name, row, count in folded(plan.rows):
        what = row.scheme.text if row.scheme else "dense"
        why = f"{row.method}" if row.scheme else row.reason
        shape = f"{row.shape[0]}×{row.shape[1]}"
        *begun, last = textwrap.wrap(name, 42, break_on_hyphens=False)
        lines += [*begun, f"{last:42} {shape:>12}  {what}"]
        extra = f"{count} × " if count > 1 else ""
        sizes = f"{show_bytes(row.bytes_before)} → {show_bytes(row.bytes_after)}"
        lines.append(f"  {extra}{sizes}, {why}" + (f" ({row.reason})" if row.scheme and row.reason else ""))
    data = plan.calibration
    statistics = "none needed"
    if plan.statistics != "none":
        passes = "one suspended pass" if plan.sequential else "two passes"
        statistics = f"{plan.statistics}, {passes} a block"
    asked = f" (asked: {data['asked']}; {data['reason']})" if data.get("reason") else ""
    facts = [
        ("size", f"{show_bytes(plan.bytes_before)} → {show_bytes(plan.bytes_after)}"),
        ("bits per quantized weight", f"{plan.bpw:.3f}"),
        ("KV cache per token", _cache_text(plan)),
        ("statistics", statistics),
        ("calibration data", f"{data['dataset']}{asked}" if plan.statistics != "none" else "none needed"),
        ("calibration tokens", f"{data['tokens']:,} and {data['heldout']:,} held out"),
        ("suite", cost or plan.suite),
        ("loaded by", ", ".join(plan.loaders)),
        ("peak memory, about", show_bytes(plan.memory_bytes)),
        ("disk while running", show_bytes(plan.disk_bytes)),
    ]
    lines += ["", *(line for key, value in facts for line in _fact(key, value))]
    lines += [line for note in plan.notes for line in _fact("note", note)]
    lines += [line for refusal in plan.refusals for line in _fact("REFUSED", refusal)]
    return "\n".join(lines)


def _cache_text(plan: Plan) -> str:
    before = show_bytes(plan.kv_bytes_per_token)
    return f"{before} → {show_bytes(plan.kv_bytes_per_token // 2)} ({plan.kv_cache})" if plan.kv_cache else before


def _fact(key: str, value: str) -> list[str]:
    wrapped = textwrap.wrap(value, WIDTH - 28, break_on_hyphens=False) or [""]
    return [f"{key:27} {wrapped[0]}", *(" " * 28 + rest for rest in wrapped[1:])]
