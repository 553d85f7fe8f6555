"""Divergence and agreement on distributions small enough to work out by hand; what is kept of a base."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.evaluation import worker
from compress.evaluation.compare import verdict
from compress.evaluation.fidelity import (
    Fidelity,
    by_position,
    compare_logits,
    fidelity_rows,
    floor_row,
    position_classes,
)
from compress.evaluation.suite import Suite
from tests.conftest import MakeTiny


def by(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(row["metric"], row["subject"]): row for row in rows}


def logits(*rows: list[float]) -> Tensor:
    """Distributions as logits."""
    return torch.tensor(rows).log()


BASE = logits([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02])
ARTIFACT = logits([0.25, 0.5, 0.125, 0.0625, 0.03125, 0.03125], [0.9, 0.02, 0.02, 0.02, 0.02, 0.02])


def test_two_positions_by_hand() -> None:
    found = compare_logits(BASE, ARTIFACT, torch.tensor([1, 0]))
    # 0.5 ln 2 − 0.25 ln 2: two tokens change places, everything else is alike
    assert found.kld_P.tolist() == pytest.approx([0.25 * math.log(2), 0], abs=1e-6)
    assert found.nll_base_P.tolist() == pytest.approx([math.log(4), -math.log(0.9)], abs=1e-6)
    assert found.nll_artifact_P.tolist() == pytest.approx([math.log(2), -math.log(0.9)], abs=1e-6)
    assert found.agree_P.tolist() == [0, 1]
    assert found.agree5_P.tolist() == [1, 1]
    assert found.confidence_P.tolist() == pytest.approx([0.5, 0.9], rel=1e-6)
    rows = by(fidelity_rows(found, "text", {}, 2))
    assert rows["kld_max", "pair"]["value"] == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert rows["kld_mean", "pair"]["value"] == pytest.approx(0.125 * math.log(2), rel=1e-5)
    assert rows["top1_agreement", "pair"]["value"] == 0.5
    assert rows["nonfinite", "pair"]["value"] == 0
    sure = rows["kld_mean", "pair"]["context"]["by_confidence"]
    assert [(part["from"], part["to"], part["n"]) for part in sure] == [(0.5, 0.75, 1), (0.75, 0.95, 1)]
    assert [part["top1_agreement"] for part in sure] == [0, 1]


def test_five_likeliest_overlap() -> None:
    base = logits([0.3, 0.2, 0.15, 0.12, 0.1, 0.05, 0.05, 0.03])
    other = logits([0.3, 0.2, 0.05, 0.03, 0.1, 0.15, 0.12, 0.05])
    assert compare_logits(base, other, torch.tensor([0])).agree5_P.tolist() == pytest.approx([0.6])
    few = logits([0.6, 0.3, 0.1])
    assert compare_logits(few, few, torch.tensor([0])).agree5_P.tolist() == [1]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_counted_and_fails_the_verdict(broken: float) -> None:
    artifact = ARTIFACT.clone()
    artifact[1, 3] = broken
    rows = fidelity_rows(compare_logits(BASE, artifact, torch.tensor([1, 0])), "text", {}, 2)
    found = by(rows)
    assert (found["nonfinite", "pair"]["value"], found["nonfinite", "pair"]["n"]) == (1, 2)
    assert found["kld_mean", "pair"]["value"] == pytest.approx(0.25 * math.log(2), rel=1e-5)  # of what is left
    suite = Suite.model_validate({"version": 1, "summary": "s", "text": {"dataset": "file:text"}})
    given = verdict(rows, suite, 0.01)
    assert given
    assert given["overall"] == "worse"
    artifact[:] = math.nan
    alone = fidelity_rows(compare_logits(BASE, artifact, torch.tensor([1, 0])), "text", {}, 2)
    assert by(alone)["nonfinite", "pair"]["value"] == 2
    assert (verdict(alone, suite, 0.01) or {})["overall"] == "worse"


def test_classes_of_positions_double() -> None:
    assert position_classes(511) == [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 511)]
    assert position_classes(16) == [(1, 16)]
    assert position_classes(17) == [(1, 16), (17, 17)]
    assert position_classes(7) == [(1, 7)]
    assert position_classes(4095)[-2:] == [(1025, 2048), (2049, 4095)]


def test_two_windows_by_position_by_hand() -> None:
    """Positions 1 to 18 of two windows; the second window's last position is no number."""
    first, second = [1.0] * 16 + [3.0, 5.0], [2.0] * 16 + [7.0, math.nan]
    found = by_position(torch.tensor(first + second, dtype=torch.float64), 2)
    assert [(part["from"], part["to"], part["n"]) for part in found] == [(1, 16, 32), (17, 18, 3)]
    assert [part["nats"] for part in found] == [1.5, 5.0]
    half = 12.706 * 0.5  # Student's t times the standard error of 1 and 2
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((1.5 - half, 1.5 + half))
    (alone,) = by_position(torch.tensor(first[:16], dtype=torch.float64), 1)
    assert (alone["nats"], alone["low"], alone["high"]) == (1.0, None, None)
    assert by_position(torch.full((4,), math.nan, dtype=torch.float64), 2) == []


def test_rows_say_where_in_the_window_the_loss_is() -> None:
    change = [0.0] * 16 + [0.5] * 4
    base = torch.full((40,), 2.0, dtype=torch.float64)
    nothing = torch.zeros(40, dtype=torch.float64)
    found = Fidelity(base, base + torch.tensor(change * 2), nothing, nothing, nothing, nothing)
    rows = by(fidelity_rows(found, "text", {}, 2))
    assert rows["nll_delta", "pair"]["value"] == pytest.approx(0.1)
    seen = {s: rows[m, s]["context"]["by_position"] for m, s in (("perplexity", "base"), ("perplexity", "artifact"),
            ("nll_delta", "pair"))}  # fmt: skip
    assert {s: [part["nats"] for part in parts] for s, parts in seen.items()} == {
        "base": [2.0, 2.0], "artifact": [2.0, 2.5], "pair": [0.0, 0.5],
    }  # fmt: skip
    broken = found.nll_artifact_P.clone()
    broken[0] = math.nan
    parts = by(fidelity_rows(Fidelity(base, broken, *[nothing] * 4), "text", {}, 2))["perplexity", "base"]["context"]
    assert [part["n"] for part in parts["by_position"]] == [31, 8]  # both models on the same positions


def test_the_same_model_differs_by_nothing() -> None:
    found = compare_logits(BASE, BASE, torch.tensor([1, 0]))
    assert floor_row(found, "text", {})["value"] == 0
    assert bool(found.finite_P.all())
    assert Fidelity.joined([found, found]).kld_P.tolist() == [0] * 4


def test_a_base_is_computed_once(tiny: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept gives the same rows to the last bit; what is damaged is computed again."""
    base, artifact = tiny("llama", tied=True), tiny("llama", tied=True, seed=1)
    kept = tmp_path / "hidden" / "base.safetensors"
    passes: list[Path] = []
    opened = worker.stream

    def counted(model: Any, *given: Any, **options: Any) -> Tensor:
        passes.append(model)
        return opened(model, *given, **options)

    monkeypatch.setattr(worker, "stream", counted)
    monkeypatch.setattr(worker, "tell", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    tokens_NT = torch.randint(3, 259, (6, 32), generator=generator)
    request = {
        "base": str(base), "artifact": str(artifact), "tokens": tokens_NT.tolist(), "task": "text",
        "conditions": {"runtime": "stream"}, "threads": 1, "kept": str(kept),
    }  # fmt: skip
    first = worker.answer(request)
    assert len(passes) == 3  # the artifact, the base, and the base in bfloat16
    assert worker.answer(request) == first
    assert len(passes) == 4
    kept.write_bytes(kept.read_bytes()[:-40])
    assert worker.answer(request) == first
    assert len(passes) == 7
    assert worker.answer({**request, "kept": None}) == first
    rows = by(first)
    assert 0 < rows["kld_floor", "base"]["value"] < 0.01 < rows["kld_mean", "pair"]["value"]
    assert rows["kld_floor", "base"]["n"] == 6 * 31
    alone = worker.answer({**request, "base": None})
    assert [part["n"] for part in alone[0]["context"]["by_position"]] == [6 * 16, 6 * 15]
    assert alone[0]["context"] == rows["perplexity", "artifact"]["context"]
