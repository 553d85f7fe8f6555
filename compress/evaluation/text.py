"""Numbers as people read them: three significant digits, units, and a dash for what was not measured."""

import math
from collections.abc import Callable

MISSING = "–"


def sig3(value: float) -> str:
    """Three significant digits: 1234.5 → "1,230", 0.01234 → "0.0123", 0.00000123 → "1.23e-06"."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    digits = 2 - math.floor(math.log10(abs(rounded)))  # 9.999 has become 10.0
    return f"{rounded:,.{max(0, digits)}f}"


def show_bytes(value: float) -> str:
    """Decimal units, as disks and hubs count: 538000000 → "538 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{sig3(value / size)} {unit}"
    return f"{value:.0f} B"


def show_seconds(value: float) -> str:
    """0.0123 → "12.3 ms"."""
    return f"{sig3(value)} s" if abs(value) >= 0.9995 else f"{sig3(value * 1000)} ms"


def show_percent(value: float) -> str:
    """A fraction in percent: 0.9912 → "99.1%"."""
    return f"{sig3(value * 100)}%"


def signed(show: Callable[[float], str]) -> Callable[[float], str]:
    """`show` with the sign always there: "+0.123", "−0.123", "0"."""

    def shown(value: float) -> str:
        text = show(abs(value))
        return text if value == 0 else f"{'+' if value > 0 else '−'}{text}"

    return shown


def show_points(value: float) -> str:
    """A difference of fractions in percentage points, with its sign: −0.0042 → "−0.42 pp"."""
    points = round(value * 100, 2)
    return signed(lambda size: f"{size:.2f} pp")(points)


def show_ratio(base: float, artifact: float) -> str:
    """artifact ÷ base: "0.29×"; nothing to divide by: "–"."""
    if base == 0:
        return MISSING
    ratio = artifact / base
    return f"{ratio:.2f}×" if 0.1 <= abs(ratio) < 100 else f"{sig3(ratio)}×"


def show_change(base: float, artifact: float) -> str:
    """The relative change in percent with its sign: "+0.43%"; for what changes by little."""
    if base == 0:
        return MISSING
    percent = (artifact / base - 1) * 100
    return "0%" if abs(percent) < 5e-5 else f"{signed(sig3)(percent)}%"


def show_difference(base: float, artifact: float) -> str:
    """artifact − base of two fractions, in percentage points."""
    return show_points(artifact - base)


def plain(text: str) -> str:
    """One line of text without control characters (a name could move a terminal's cursor)."""
    return "".join(char if char.isprintable() else " " for char in text)
