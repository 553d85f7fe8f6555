"""How far the artifact's predictions are from the base's: perplexity of both, KL divergence, agreement.

Both models see the same windows. For every position with a next token, the whole distribution of both is
computed (nothing is cut to a top k), so the divergence is exact; logits exist for a few positions at a time.

Left out: intervals of the divergence, and a noise floor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.evaluation.intervals import mean_interval
from compress.evaluation.metrics import Row, Subject, row

_LOGITS = 1 << 20  # logits computed at a time, for each model

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fidelity:
    """Per position with a next token, float64 [P]: negative log-likelihoods, KL(base ‖ artifact), agreement."""

    nll_base_P: Tensor
    nll_artifact_P: Tensor
    kld_P: Tensor
    agree_P: Tensor


def compare_logits(base_PV: Tensor, artifact_PV: Tensor, target_P: Tensor) -> Fidelity:
    """Compares two models' logits, float [P, V], at positions whose next tokens are `target_P` int64."""
    log_p, log_q = base_PV.log_softmax(-1), artifact_PV.log_softmax(-1)
    kld_P = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
    index = target_P.unsqueeze(-1)
    return Fidelity(
        -log_p.gather(-1, index).squeeze(-1).double(),
        -log_q.gather(-1, index).squeeze(-1).double(),
        kld_P.clamp_min(0),  # rounding can leave a divergence of -1e-8
        (base_PV.argmax(-1) == artifact_PV.argmax(-1)).double(),
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
    return Fidelity(
        torch.cat([p.nll_base_P for p in parts]),
        torch.cat([p.nll_artifact_P for p in parts]),
        torch.cat([p.kld_P for p in parts]),
        torch.cat([p.agree_P for p in parts]),
    )


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
    size = max(1, _LOGITS // head(hidden_1TD[:, :1]).shape[-1])
    return ((start, min(start + size, last)) for start in range(0, last, size))


def fidelity_rows(found: Fidelity, task: str, conditions: dict[str, Any], windows: int) -> list[Row]:
    """The report's rows of a comparison; `windows` of equal length are what was drawn, so the interval is by them."""
    n = len(found.kld_P)
    kld = found.kld_P
    values = {
        "kld_median": kld.quantile(0.5),
        "kld_p90": kld.quantile(0.9),
        "kld_p99": kld.quantile(0.99),
        "top1_agreement": found.agree_P.mean(),
    }
    percentiles = kld.quantile(torch.linspace(0, 1, 101, dtype=kld.dtype)).tolist()
    per_window = (found.nll_artifact_P - found.nll_base_P).reshape(windows, -1).mean(1)
    low, high = mean_interval(per_window.numpy())
    difference = row(
        "nll_delta", "pair", task, float(per_window.mean()), low=low, high=high, n=windows, conditions=conditions,
        context={"interval": "95%, Student, over windows"},
    )  # fmt: skip
    context = {"percentiles": percentiles}
    return [
        perplexity_row("base", found.nll_base_P, task, conditions),
        perplexity_row("artifact", found.nll_artifact_P, task, conditions),
        difference,
        row("kld_mean", "pair", task, float(kld.mean()), n=n, conditions=conditions, context=context),
        *(row(m, "pair", task, float(v), n=n, conditions=conditions) for m, v in values.items()),
    ]


def perplexity_row(subject: Subject, nll_P: Tensor, task: str, conditions: dict[str, Any]) -> Row:
    """The row of one model's perplexity."""
    return row("perplexity", subject, task, float(nll_P.mean().exp()), n=len(nll_P), conditions=conditions)
