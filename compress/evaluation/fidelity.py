"""How far the artifact's predictions are from the base's: perplexity of both, KL divergence, agreement.

Both models see the same windows. For every position with a next token, the whole distribution of both is
computed (nothing is cut to a top k), so the divergence is exact; logits exist for a few positions at a time.

Positions at which a model gives no finite numbers are counted and left out of the other figures: none may be left
out silently, and a verdict fails by them. The noise floor is the base compared with itself, computed in bfloat16 and in
other batches: what a reader sees of a model that is as good as the base.

Means by position in the window, in classes that double, tell whether a loss grows with what a model has read.

Left out: intervals of the divergence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.evaluation.intervals import mean_interval
from compress.evaluation.metrics import Row, Subject, row

_LOGITS = 1 << 20  # logits computed at a time, for each model
_LEAST = 16  # positions at a time nevertheless: a head is read anew for each piece, which costs more than its product
_LIKELIEST = 5  # tokens
_FIRST = 16  # positions of a window's first class; each further class ends at twice the position of the last
_CONFIDENCE = (0.25, 0.5, 0.75, 0.95)  # the base's probability of its likeliest token, where its classes end

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fidelity:
    """Per position with a next token, float64 [P].

    Attributes:
        nll_base_P, nll_artifact_P: negative log-likelihoods of the next token, nats.
        kld_P: KL(base ‖ artifact), nats.
        agree_P: whether the likeliest token is the same.
        agree5_P: the share of the base's five likeliest tokens that are among the artifact's.
        confidence_P: the base's probability of its likeliest token.
    """

    nll_base_P: Tensor
    nll_artifact_P: Tensor
    kld_P: Tensor
    agree_P: Tensor
    agree5_P: Tensor
    confidence_P: Tensor

    @property
    def finite_P(self) -> Tensor:
        """Where both models give finite numbers, bool [P]."""
        return self.nll_base_P.isfinite() & self.nll_artifact_P.isfinite() & self.kld_P.isfinite()

    def at(self, chosen_P: Tensor) -> "Fidelity":
        """Of some positions only."""
        return Fidelity(*(part[chosen_P] for part in self._parts()))

    def _parts(self) -> tuple[Tensor, ...]:
        return (
            self.nll_base_P, self.nll_artifact_P, self.kld_P, self.agree_P, self.agree5_P, self.confidence_P
        )  # fmt: skip

    @staticmethod
    def joined(parts: "list[Fidelity]") -> "Fidelity":
        """Of all positions, in order."""
        return Fidelity(*(torch.cat(same) for same in zip(*(part._parts() for part in parts), strict=True)))


def compare_logits(base_PV: Tensor, artifact_PV: Tensor, target_P: Tensor) -> Fidelity:
    """Compares two models' logits, float [P, V], at positions whose next tokens are `target_P` int64."""
    log_p, log_q = base_PV.log_softmax(-1), artifact_PV.log_softmax(-1)
    kld_P = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
    index = target_P.unsqueeze(-1)
    likeliest = min(_LIKELIEST, base_PV.shape[-1])
    base_Pk, artifact_Pk = (logits_PV.topk(likeliest, -1).indices for logits_PV in (base_PV, artifact_PV))
    shared_Pk = (base_Pk.unsqueeze(-1) == artifact_Pk.unsqueeze(-2)).any(-1)
    return Fidelity(
        -log_p.gather(-1, index).squeeze(-1).double(),
        -log_q.gather(-1, index).squeeze(-1).double(),
        kld_P.clamp_min(0),  # rounding can leave a divergence of -1e-8
        (base_PV.argmax(-1) == artifact_PV.argmax(-1)).double(),
        shared_Pk.double().mean(-1),
        log_p.amax(-1).exp().double(),
    )


def compare_hidden(
    heads: tuple[Head, Head],
    hidden: Callable[[int], tuple[Tensor, Tensor]],
    tokens_NT: Tensor,
) -> Fidelity:
    """Compares two models from their last hidden states.

    Args:
        heads: from hidden states [1, P, D] to logits [1, P, V], of base and artifact.
        hidden: a window's number to both models' hidden states, float32 [1, T, D].
        tokens_NT: the windows, int64.
    """
    parts: list[Fidelity] = []
    for n, tokens_T in enumerate(tokens_NT):
        base_1TD, artifact_1TD = hidden(n)
        for start, end in _pieces(heads[0], base_1TD):
            logits = [head(h[:, start:end])[0] for head, h in zip(heads, (base_1TD, artifact_1TD), strict=True)]
            parts.append(compare_logits(logits[0], logits[1], tokens_T[start + 1 : end + 1]))
    return Fidelity.joined(parts)


def next_token_nll(head: Head, hidden: Callable[[int], Tensor], tokens_NT: Tensor) -> Tensor:
    """Negative log-likelihood of every next token, nats, float64 [N (T − 1)]."""
    parts = []
    for n, tokens_T in enumerate(tokens_NT):
        hidden_1TD = hidden(n)
        for start, end in _pieces(head, hidden_1TD):
            log_p = head(hidden_1TD[:, start:end])[0].log_softmax(-1)
            parts.append(-log_p.gather(-1, tokens_T[start + 1 : end + 1].unsqueeze(-1)).squeeze(-1).double())
    return torch.cat(parts)


def _pieces(head: Head, hidden_1TD: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of the positions with a next token, of so many that their logits stay few."""
    last = hidden_1TD.shape[1] - 1
    size = max(_LEAST, _LOGITS // head(hidden_1TD[:, :1]).shape[-1])
    return ((start, min(start + size, last)) for start in range(0, last, size))


def fidelity_rows(found: Fidelity, task: str, conditions: dict[str, Any], windows: int) -> list[Row]:
    """The report's rows of a comparison; `windows` of equal length are what was drawn, so the interval is by them."""
    change_P = found.nll_artifact_P - found.nll_base_P
    per_window = change_P.reshape(windows, -1).mean(1)
    low, high = mean_interval(per_window.numpy())
    finite_P = found.finite_P
    seen = [
        by_position(part_P.masked_fill(~finite_P, torch.nan), windows)
        for part_P in (found.nll_base_P, found.nll_artifact_P, change_P)
    ]
    difference = row(
        "nll_delta", "pair", task, float(per_window.mean()), low=low, high=high, n=windows, conditions=conditions,
        context={"interval": "95%, Student, over windows", "by_position": seen[2]},
    )  # fmt: skip
    lost = int((~finite_P).sum())
    rows = [difference, row("nonfinite", "pair", task, lost, n=len(finite_P), conditions=conditions)]
    if lost == len(finite_P):
        return rows
    found = found.at(finite_P)
    kld, n = found.kld_P, len(found.kld_P)
    values = {
        "kld_median": kld.quantile(0.5),
        "kld_p90": kld.quantile(0.9),
        "kld_p99": kld.quantile(0.99),
        "kld_max": kld.max(),
        "top1_agreement": found.agree_P.mean(),
        "top5_agreement": found.agree5_P.mean(),
    }
    percentiles = kld.quantile(torch.linspace(0, 1, 101, dtype=kld.dtype)).tolist()
    context = {"percentiles": percentiles, "by_confidence": _by_confidence(found)}
    return [
        perplexity_row("base", found.nll_base_P, task, conditions, seen[0]),
        perplexity_row("artifact", found.nll_artifact_P, task, conditions, seen[1]),
        *rows,
        row("kld_mean", "pair", task, float(kld.mean()), n=n, conditions=conditions, context=context),
        *(row(m, "pair", task, float(v), n=n, conditions=conditions) for m, v in values.items()),
    ]


def _by_confidence(found: Fidelity) -> list[dict[str, float]]:
    """Divergence and agreement by how sure the base is: errors where it is sure are those that a user sees."""
    classes = torch.bucketize(found.confidence_P, torch.tensor(_CONFIDENCE, dtype=torch.float64), right=True)
    ends = (0.0, *_CONFIDENCE, 1.0)
    parts = [(i, found.at(classes == i)) for i in range(len(_CONFIDENCE) + 1) if bool((classes == i).any())]
    return [
        {
            "from": ends[i], "to": ends[i + 1], "n": len(part.kld_P), "kld_mean": float(part.kld_P.mean()),
            "top1_agreement": float(part.agree_P.mean()),
        }
        for i, part in parts
    ]  # fmt: skip


def floor_row(found: Fidelity, task: str, conditions: dict[str, Any]) -> Row:
    """The noise floor's row: the base against itself, computed otherwise."""
    found = found.at(found.finite_P)
    context = {
        "kld_p99": float(found.kld_P.quantile(0.99)), "top1_agreement": float(found.agree_P.mean()),
        "against": "the base itself in bfloat16, one window at a time",
    }  # fmt: skip
    return row("kld_floor", "base", task, float(found.kld_P.mean()), n=len(found.kld_P), conditions=conditions,
               context=context)  # fmt: skip


def perplexity_row(
    subject: Subject, nll_P: Tensor, task: str, conditions: dict[str, Any], seen: list[dict[str, Any]]
) -> Row:
    """The row of one model's perplexity; `seen` is its negative log-likelihood `by_position`."""
    value = float(nll_P.mean().exp())
    return row("perplexity", subject, task, value, n=len(nll_P), conditions=conditions, context={"by_position": seen})


def position_classes(length: int) -> list[tuple[int, int]]:
    """First and last of the positions 1 to `length` in each class: 1–16, 17–32, 33–64, … as far as there are any."""
    ends = [_FIRST]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    firsts = [1, *(end + 1 for end in ends[:-1])]
    return [(first, min(end, length)) for first, end in zip(firsts, ends, strict=True)]


def by_position(values_P: Tensor, windows: int) -> list[dict[str, Any]]:
    """Means of nats over classes of the position in a window; position p has p tokens to predict the next from.

    Args:
        values_P: float64, of windows of one length, one after the other; what is not finite is left out.

    Returns:
        For each class with values `from`, `to`, `n`, the mean `nats`, and its interval over windows `low`, `high`,
        None where there is only one window.
    """
    values_NT = values_P.reshape(windows, -1)
    values_NT = values_NT.masked_fill(~values_NT.isfinite(), torch.nan)
    found = []
    for first, last in position_classes(values_NT.shape[1]):
        part_NT = values_NT[:, first - 1 : last]
        means = part_NT.nanmean(1)
        means = means[~means.isnan()]
        if len(means):
            low, high = mean_interval(means.numpy()) if len(means) > 1 else (None, None)
            n, mean = int((~part_NT.isnan()).sum()), float(part_NT.nanmean())
            found.append({"from": first, "to": last, "n": n, "nats": mean, "low": low, "high": high})
    return found
