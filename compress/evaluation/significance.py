"""What a paired comparison can show: exact p-values, their correction for many tasks, and power.

Of n documents that two models answer, only those tell anything that one has right and the other wrong: lost and gained.
Where the models are equally good each falls to either side like a coin (McNemar 1947, exact form). The mean of the
paired differences has variance (ψ − δ²) / n, with ψ the share of such documents and δ the difference; unpaired means
have (p(1 − p) + q(1 − q)) / n, which is far more where the models mostly agree.

Left out: mid-p values; power by simulation.
"""

import math
from collections.abc import Sequence

_TWO_SIDED = 1.959963984540054  # 5%
_SEEN = 0.8416212335729143  # 80% of the time
_REACH = _TWO_SIDED + _SEEN


def mcnemar(lost: int, gained: int) -> float:
    """The exact two-sided p-value of equally good models giving a split as uneven as this; 1 without any change."""
    changed, fewer = lost + gained, min(lost, gained)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**changed))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for as many comparisons as there are, in their order (Holm 1979): 0.05 holds for all together."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def smallest_difference(n: int, changed: int) -> float:
    """The difference in accuracy that n paired documents show 80% of the time, of which `changed` differ.

    A document is added to either side, as for the interval, so that no change does not promise to see everything.
    """
    share = (changed + 2) / (n + 2)
    return _REACH * math.sqrt(share / (n + _REACH**2))


def smallest_difference_unpaired(n: int, accuracies: tuple[float, float]) -> float:
    """The same where each model had n documents of its own."""
    return _REACH * math.sqrt(sum(p * (1 - p) for p in accuracies) / n)


def more_needed(n: int, value: float, interval: tuple[float, float], margin: float) -> int | None:
    """About how many more cases would decide on which side of the margin a value lies; None where none would.

    The interval shrinks with the square root of the cases; the value is taken to stay where it is.

    Args:
        n: cases so far.
        value, interval: with more being better.
        margin: where "as good" ends: −δ.
    """
    distance = abs(value - margin)
    half = value - interval[0] if value > margin else interval[1] - value
    if distance == 0 or not math.isfinite(half / distance):
        return None
    return max(0, math.ceil(n * (half / distance) ** 2) - n)
