"""The metrics and the one row schema that everything measured is written in.

Reports, cards, tables, comparisons and charts read these rows and nothing else. `conditions` holds
what makes two numbers comparable; a metric's version changes when its definition does.
"""

from dataclasses import dataclass
from typing import Any, Literal

Subject = Literal["base", "artifact", "pair"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """What a metric's number means: its unit, which direction is better, and its definition's version."""

    unit: str
    better: Literal["lower", "higher", "neither"]
    summary: str
    version: int = 1


METRICS: dict[str, Metric] = {
    "perplexity": Metric("", "lower", "exp of the mean negative log-likelihood of a token"),
    "kld_mean": Metric("nats", "lower", "mean over positions of KL(base || artifact), whole vocabulary"),
    "kld_median": Metric("nats", "lower", "median over positions of KL(base || artifact)"),
    "kld_p90": Metric("nats", "lower", "90th percentile over positions of KL(base || artifact)"),
    "kld_p99": Metric("nats", "lower", "99th percentile over positions of KL(base || artifact)"),
    "kld_max": Metric("nats", "lower", "largest KL(base || artifact) of a position"),
    "kld_floor": Metric("nats", "lower", "mean KL divergence of the base from itself in bfloat16 and other batches"),
    "nonfinite": Metric("", "lower", "positions at which a model gives no finite numbers"),
    "nll_delta": Metric("nats", "lower", "log of the ratio of the perplexities, artifact over base, same tokens"),
    "top1_agreement": Metric("fraction", "higher", "share of positions with the same most likely token"),
    "top5_agreement": Metric("fraction", "higher", "share of the base's five likeliest tokens among the artifact's"),
    "greedy_agreement": Metric(
        "tokens",
        "higher",
        "tokens of both greedy outputs before the first that differs, the limit where none does, mean",
    ),
    "greedy_agreement_median": Metric("tokens", "higher", "the same, median over prompts"),
    "repetition": Metric("fraction", "lower", "share of greedy tokens that end a 4-gram seen before in that output"),
    "endings": Metric("fraction", "neither", "share of prompts after which a model ends within the limit of tokens"),
    "target_perplexity": Metric("", "lower", "exp of the mean negative log-likelihood of a document's whole answer"),
    "acc": Metric("fraction", "higher", "share of documents whose right choice is the likeliest"),
    "acc_norm": Metric("fraction", "higher", "the same, with log-likelihoods divided by the choices' characters"),
    "word_perplexity": Metric("", "lower", "perplexity of a word, whole pages"),
    "byte_perplexity": Metric("", "lower", "perplexity of a byte, whole pages"),
    "bits_per_byte": Metric("bits", "lower", "bits for a byte of text, whole pages"),
    "acc_delta": Metric("fraction", "higher", "accuracy of the artifact minus that of the base, same documents"),
    "flips": Metric("fraction", "lower", "share of documents that one model has right and the other wrong"),
    "mcnemar_p": Metric("", "neither", "exact two-sided p of equally good models changing so unevenly (McNemar)"),
    "smallest_difference": Metric(
        "fraction", "lower", "accuracy difference that so many documents show 80% of the time"
    ),
    "recovery": Metric("ratio", "higher", "(artifact - chance) / (base - chance), pooled over tasks"),
    "block_error": Metric("fraction", "lower", "relative error of a block's output, both chains, held-out"),
    "size_bytes": Metric("bytes", "lower", "weights of the checkpoint on disk"),
    "bpw": Metric("bits", "lower", "bits per quantized weight, scales and zero points included"),
    "kv_bytes_per_token": Metric("bytes", "lower", "key and value cache of one token, all layers"),
    "prefill_tok_s": Metric("tok/s", "higher", "prompt tokens processed per second, whole batch"),
    "decode_tok_s": Metric("tok/s", "higher", "new tokens per second, whole batch"),
    "ttft_s": Metric("s", "lower", "time to the first token"),
    "itl_s": Metric("s", "lower", "time between tokens, median"),
    "ttft_p90_s": Metric("s", "lower", "time to the first token, 90th percentile"),
    "ttft_p99_s": Metric("s", "lower", "time to the first token, 99th percentile"),
    "itl_p90_s": Metric("s", "lower", "time between tokens, 90th percentile"),
    "itl_p99_s": Metric("s", "lower", "time between tokens, 99th percentile"),
    "ceiling_tok_s": Metric("tok/s", "higher", "new tokens per second if memory bandwidth were the only limit"),
    "mbu": Metric("fraction", "higher", "bytes that a decode pass must read per second, of the machine's bandwidth"),
    "mfu": Metric("fraction", "higher", "arithmetic of a prompt's linear layers per second, of the machine's rate"),
    "energy_j": Metric("J", "lower", "energy of the processor packages for one prefill and its decode passes"),
    "weight_bytes": Metric("bytes", "lower", "weights in memory while they run, second copies included"),
    "kv_cache_bytes": Metric("bytes", "lower", "keys and values of the whole batch at its longest"),
    "load_s": Metric("s", "lower", "time to load, from opening the folder to a model that can run"),
    "peak_memory_bytes": Metric("bytes", "lower", "peak resident memory of the measuring process"),
    "compress_cpu_s": Metric("s", "lower", "CPU time of making the artifact"),
    "compress_wall_s": Metric("s", "lower", "wall time of making the artifact"),
    "compress_peak_bytes": Metric("bytes", "lower", "peak resident memory of making the artifact"),
}


def row(  # noqa: PLR0913  # a row has as many fields
    metric: str,
    subject: Subject,
    task: str,
    value: float | None,
    *,
    low: float | None = None,
    high: float | None = None,
    n: int | None = None,
    conditions: dict[str, Any] | None = None,
    context: dict[str, Any] | None = None,
) -> Row:
    """One measurement in the report's schema; the unit comes from `METRICS`."""
    assert metric in METRICS, f"unregistered metric {metric}"
    return {
        "metric": metric, "subject": subject, "task": task, "value": value, "unit": METRICS[metric].unit,
        "low": low, "high": high, "n": n, "conditions": conditions or {}, "context": context or {},
    }  # fmt: skip
