"""Reports for the tests: one with every kind of row, drawn with numbers of a usual size, and what it is made of."""

import math
import random
from typing import Any

from compress.evaluation.fidelity import position_classes
from compress.evaluation.metrics import Row, row
from compress.evaluation.report import Report, build

EVIL = "</script><img src=x onerror=alert(1)><!-- <script>alert(2)</script> | `x` [a](http://evil) {{7*7}} ' \""
TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande")
GRID = ((1, 128, 16), (4, 128, 16), (1, 512, 16))
TEXT = {"runtime": "stream", "dtype": "float32", "seq_len": 512, "data": "7d8aa94d0980414e"}
SPEED = {"runtime": "hf", "device": "cpu", "threads": 2, "dtype": "bfloat16", "hardware": "CPU × 2"}
HARNESS = {"backend": "lm-eval 0.4.13", "runtime": "hf", "dtype": "float32", "device": "cpu",
           "num_fewshot": 0, "sample": "first 1000"}  # fmt: skip


def cost_rows(grid: tuple[tuple[int, int, int], ...] = GRID) -> list[Row]:
    """Size, speed and memory of both."""
    rows = [
        row("size_bytes", "base", "checkpoint", 538e6), row("size_bytes", "artifact", "checkpoint", 156e6),
        row("bpw", "base", "checkpoint", 16.0), row("bpw", "artifact", "checkpoint", 4.25),
    ]  # fmt: skip
    for subject, speed in (("base", 1.0), ("artifact", 1.6)):
        context = {"cpu_share": 0.97, "weights": "bfloat16", "load_average": [0.1, 0.2, 0.3]}
        for batch, length, output in grid:
            where = {**SPEED, "batch": batch, "context": length, "output": output}
            for metric, value in (("ttft_s", 0.3 * batch * length / 128), ("itl_s", 0.06 * batch**0.5)):
                rows.append(row(metric, subject, "speed", value / speed, low=0.93 * value / speed, n=4,
                                high=1.1 * value / speed, conditions=where, context=context))  # fmt: skip
            for part, share in (("p90", 1.08), ("p99", 1.1)):
                rows += [
                    row(f"ttft_{part}_s", subject, "speed", 0.3 * share, n=4, conditions=where, context=context),
                    row(f"itl_{part}_s", subject, "speed", 0.06 * share, n=64, conditions=where, context=context),
                ]  # fmt: skip
            for metric, value in (("mbu", 0.31), ("mfu", 0.42), ("ceiling_tok_s", 90.0), ("kv_cache_bytes", 3.3e6)):
                rows.append(row(metric, subject, "speed", value, conditions=where, context=context))
            for metric, value in (("prefill_tok_s", 400.0), ("decode_tok_s", 16.0)):
                median = speed * value * batch**0.7
                rows.append(row(metric, subject, "speed", median, low=0.93 * median, high=1.1 * median, n=4,
                                conditions=where, context=context))  # fmt: skip
        rows.append(row("peak_memory_bytes", subject, "speed", 8e8 / speed, low=7.9e8 / speed, high=8e8 / speed, n=2,
                        conditions=SPEED, context=context))  # fmt: skip
        rows += [
            row("weight_bytes", subject, "speed", 2.7e8 / speed, conditions=SPEED, context=context),
            row("energy_j", subject, "speed", None, conditions=SPEED, context={**context, "absent": "no counters"}),
        ]  # fmt: skip
        rows.append(row("load_s", subject, "speed", 0.6 * speed, low=0.5 * speed, high=0.7 * speed, n=2,
                        conditions={**SPEED, "page_cache": "warm"}, context=context))  # fmt: skip
    return rows


def fidelity_rows(task: str, conditions: dict[str, Any], nats: float = 0.05) -> list[Row]:
    """Perplexity of both, and the divergence with its percentiles; some positions do not diverge at all."""
    kld = [0.0, 0.0, *(nats * math.exp(3.6 * (p / 100 - 0.5) + (p / 100) ** 12) for p in range(2, 101))]
    pair: dict[str, Any] = {"n": 8176, "conditions": conditions}
    seen = {
        name: {"by_position": [
            {"from": first, "to": last, "n": 16 * (last - first + 1), "nats": nll + slope * i,
             "low": nll + slope * i - 0.01, "high": nll + slope * i + 0.01}
            for i, (first, last) in enumerate(position_classes(511))
        ]} for name, nll, slope in (("base", 3.9, -0.3), ("artifact", 3.94, -0.29), ("pair", 0.04, 0.01))
    }  # fmt: skip
    return [
        row("perplexity", "base", task, 15.363, low=14.9, high=15.9, context=seen["base"], **pair),
        row("perplexity", "artifact", task, 16.251, low=15.7, high=16.8, context=seen["artifact"], **pair),
        row("nll_delta", "pair", task, 0.0562, low=0.0518, high=0.0607, context=seen["pair"], **pair),
        row("kld_mean", "pair", task, 1.4 * nats, low=1.36 * nats, high=1.45 * nats,
            context={"percentiles": kld}, **pair),
        row("kld_median", "pair", task, kld[50], **pair), row("kld_p90", "pair", task, kld[90], **pair),
        row("kld_p99", "pair", task, kld[99], **pair), row("top1_agreement", "pair", task, 0.8584, **pair),
    ]  # fmt: skip


def generation_rows() -> list[Row]:
    """How long both write alike, how much each repeats, and how often each ends."""
    where = {"runtime": "hf", "dtype": "float32", "device": "cpu", "batch": 16, "output": 48, "decoding": "greedy"}
    rows = [
        row("greedy_agreement", "pair", "openings", 17.4, low=10.9, high=24.6, n=16, conditions=where),
        row("greedy_agreement_median", "pair", "openings", 11.5, n=16, conditions=where),
    ]  # fmt: skip
    for subject, repeats, ends in (("base", 0.114, 0.1875), ("artifact", 0.163, 0.125)):
        rows += [
            row("repetition", subject, "openings", repeats, low=0.6 * repeats, high=1.5 * repeats, n=640,
                conditions={**where, "ngram": 4}),
            row("endings", subject, "openings", ends, low=0.03, high=0.43, n=16, conditions=where),
        ]  # fmt: skip
    return rows


def accuracy_rows(tasks: tuple[str, ...] = TASKS, n: int = 1000, seed: int = 0) -> list[Row]:
    """Accuracy of both on each task with Wilson intervals, what differs between them, and the pooled figures."""
    source = random.Random(seed)
    rows = []
    for task in tasks:
        base = source.uniform(0.3, 0.75)
        delta = source.uniform(-0.03, 0.01)
        for metric, shift in (("acc", 0.0), ("acc_norm", 0.02)):
            for subject, value in (("base", base + shift), ("artifact", base + shift + delta * (1 + shift))):
                low, high = wilson(value, n)
                rows.append(row(metric, subject, task, value, low=low, high=high, n=n, conditions=HARNESS,
                                context={"counts": metric == "acc_norm"}))  # fmt: skip
        lost, gained = round(n * 0.06), round(n * (0.06 + delta))
        half = 1.96 * math.sqrt((lost + gained) / n / n)
        rows += [
            row("acc_delta", "pair", task, delta * 1.02, low=delta - half, high=delta + half, n=n, conditions=HARNESS),
            row("flips", "pair", task, (gained + lost) / n, n=n, conditions=HARNESS,
                context={"gained": gained, "lost": lost}),
        ]  # fmt: skip
    total = n * len(tasks)
    return [
        *rows,
        row("acc_delta", "pair", "pooled", -0.0084, low=-0.0139, high=-0.0029, n=total, conditions=HARNESS),
        row("flips", "pair", "pooled", 0.11, n=total, conditions=HARNESS, context={"gained": 254, "lost": 296}),
        row("recovery", "pair", "pooled", 0.972, low=0.954, high=0.991, n=total, conditions=HARNESS),
        *(row("word_perplexity", subject, "wikitext", value, n=62, conditions=HARNESS)
          for subject, value in (("base", 28.1), ("artifact", 30.9))),
    ]  # fmt: skip


def wilson(value: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share."""
    middle, half = value + z * z / (2 * n), z * math.sqrt(value * (1 - value) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def block_rows(count: int = 30) -> list[Row]:
    """The error of each block; not in the model's order."""
    rows = [row("block_error", "pair", f"model.layers.{i}", 0.02 + 0.1 * abs(math.sin(i / 9 + 0.2)) + 0.3 * (i == 7),
                n=4096) for i in range(count)]  # fmt: skip
    random.Random(0).shuffle(rows)
    return rows


def make_report(rows: list[Row] | None = None, *, base: str | None = "org/tiny", **artifact: Any) -> Report:
    """A report, by default with every kind of row."""
    known = {
        "name": "tiny--gptq-4bit", "recipe": "gptq-4bit", "method": ["gptq"], "scheme": ["int4 sym group 64"],
        "format": "compressed-tensors", "notes": ["group_size 128 does not divide the input width 576"],
    }  # fmt: skip
    all_rows = fidelity_rows("heldout", {}) + fidelity_rows("embedded", TEXT, 0.03) + accuracy_rows() + cost_rows()
    all_rows += generation_rows()
    return build(
        artifact={**known, **artifact},
        base={"name": base, "revision": "abc", "architecture": "llama"},
        measurements=[*all_rows, *block_rows()] if rows is None else rows,
        verified={"blocks": 30, "max_error": 0.0},
        verdict={
            "overall": "undecided", "delta": 0.01, "basis": "accuracy", "tasks": {"arc_easy": "non_inferior"},
            "rule": "non-inferior when the whole 95% interval lies above −1 pp", "value": -0.0084, "low": -0.0139,
            "high": -0.0029,
        },
    )  # fmt: skip


def make_lone() -> Report:
    """One checkpoint that was compared with nothing."""
    every = make_report()
    rows = [r for r in every["measurements"] if r["subject"] == "artifact"]
    return {**every, "base": {"name": None}, "verdict": None, "measurements": rows}
