"""From recipe to verified artifact on tiny models: every pair of method, scheme and family; resume; refusals."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from compress import job, pipeline
from compress import plan as plan_module
from compress.artifact import STATE, claimed, open_artifact, read_lock
from compress.errors import CompressError
from compress.evaluation.report import read
from compress.evaluation.stream import stream
from compress.formats import gguf_file
from compress.formats.gguf_header import FILE
from compress.methods import METHODS
from compress.models.checkpoint import open_checkpoint
from compress.schemes import K_QUANTS, PRESETS
from compress.verify import Request, Unverified, examine
from tests.conftest import STRUCTURES, MakeTiny


def method_for(index: int, scheme: str) -> str:
    """Each method in turn; AWQ rounds in groups and channels only."""
    fits = PRESETS[scheme].weights.strategy in ("group", "channel")
    methods = [method for method in sorted(METHODS) if fits or method != "awq"]
    return methods[index % len(methods)]


PAIRS = [
    (family, scheme, method_for(i, scheme), bool((i // 2) % 2))
    for i, (family, scheme) in enumerate(itertools.product(STRUCTURES, sorted(set(PRESETS) - set(K_QUANTS))))
    if family != "gpt2" or PRESETS[scheme].input_activations is None  # it is only written dense
]


def write_recipe(
    folder: Path, text: Path, *, name: str = "recipe", fmt: str = "compressed-tensors", **step: Any
) -> str:
    step = {"method": "gptq", "scheme": "W4A16", "group_fallback": [64, 32], **step}
    smoothing = step["method"] == "smoothquant"
    steps = [{"method": "smoothquant"}, {**step, "method": "gptq"}] if smoothing else [step]
    document = {
        "version": 1, "summary": "a test", "steps": steps, "format": fmt,
        "calibration": {"dataset": f"file:{text}", "samples": 4, "seq_len": 32},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def run(recipe: str, model: Path, out: Path) -> pipeline.Outcome:
    return pipeline.run(recipe, str(model), out, evaluate=False, progress=lambda *_: None)


def block_errors(outcome: pipeline.Outcome) -> list[float]:
    return [row["value"] for row in outcome.report["measurements"] if row["metric"] == "block_error"]


def steps_recipe(folder: Path, text: Path, name: str, steps: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.yaml"
    calibration = {"dataset": f"file:{text}", "samples": 4, "seq_len": 32}
    fmt = "dense" if name.startswith("gpt2") else "compressed-tensors"
    document = {"version": 1, "summary": "a test", "steps": steps, "format": fmt, "calibration": calibration}
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "llama", "opt", "phi3"])
def test_smoothing_changes_nothing_but_the_rounding(
    family: str, sequential: bool, tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """At 8 bits a model is hardly changed; a channel that is scaled and not undone would change it wholly."""
    if not sequential:
        monkeypatch.setattr(plan_module, "SUSPENDED_LIMIT", 0)
    model, coder = tiny(family, tied=True), {"method": "rtn", "scheme": "W8A16"}
    chains = {
        "plain": [coder], "awq": [{"method": "awq", "scheme": "W8A16"}], "awq-rtn": [{"method": "awq"}, coder],
        "smoothed": [{"method": "smoothquant", "alpha": "auto"}, coder],
    }  # fmt: skip
    found = {}
    for name, steps in chains.items():
        outcome = run(steps_recipe(tmp_path, text, f"{family}-{name}", steps), model, tmp_path / name)
        assert outcome.report["verified"]["logit_error"] < 1e-2
        found[name] = max(block_errors(outcome))
    plan = json.loads((tmp_path / "awq" / "plan.json").read_text())
    assert plan["sequential"] is sequential
    assert any("are scaled" in note for note in plan["notes"])
    assert 0 < found["plain"] < 0.03
    for name in ("awq", "awq-rtn", "smoothed"):
        assert found[name] < 3 * found["plain"], name


@pytest.mark.usefixtures("verify_here")
def test_smoothing_scales_what_the_family_says(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """Norms and weights do change; what is left of the original is scaled consistently (the block says so above)."""
    model = tiny("llama", tied=True)
    recipe = steps_recipe(tmp_path, text, "s", [{"method": "smoothquant"}, {"method": "gptq", "scheme": "W8A8"}])
    run(recipe, model, tmp_path / "out")
    before, after = (
        open_checkpoint(folder).read(["model.layers.0.input_layernorm.weight"]) for folder in (model, tmp_path / "out")
    )
    (old,), (new,) = before.values(), after.values()
    assert new.dtype == old.dtype
    assert not torch.equal(old, new)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.usefixtures("verify_here")
def test_one_norm_that_feeds_attention_and_mlp_is_scaled_once(
    sequential: bool, tiny: MakeTiny, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon's MLP reads the norm's output after attention has been solved: divided already, and divided only once."""
    if not sequential:
        monkeypatch.setattr(plan_module, "SUSPENDED_LIMIT", 0)
    model, coder = tiny("falcon", tied=True), {"method": "gptq", "scheme": "W8A16"}
    chains = {"plain": [coder], "smoothed": [{"method": "smoothquant", "alpha": 0.8}, coder]}
    found = {
        name: run(steps_recipe(tmp_path, text, name, steps), model, tmp_path / name) for name, steps in chains.items()
    }
    norm = "transformer.h.0.input_layernorm.weight"
    (old,), (new,) = (open_checkpoint(folder).read([norm]).values() for folder in (model, tmp_path / "smoothed"))
    assert not torch.equal(old, new)
    assert max(block_errors(found["smoothed"])) < 3 * max(block_errors(found["plain"])) < 0.1


@pytest.mark.usefixtures("verify_here")
def test_weights_of_one_input_may_differ_in_scheme_or_stay_dense(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """Fewest bits choose the scales; an input that a dense weight reads too is left alone, and the plan says so."""
    overrides = [
        {"match": "model.layers.0.self_attn.q_proj", "scheme": "W8A16"},
        {"match": "model.layers.1.self_attn.q_proj", "scheme": "dense"},
    ]
    step = {"method": "awq", "scheme": "W4A16", "group_size": 32, "overrides": overrides}
    out = tmp_path / "out"
    outcome = run(steps_recipe(tmp_path, text, "mixed", [step]), tiny("llama", tied=True), out)
    norms = [f"model.layers.{i}.input_layernorm.weight" for i in (0, 1)]
    before, after = (open_checkpoint(folder).read(norms) for folder in (tiny("llama", tied=True), out))
    assert [torch.equal(before[name], after[name]) for name in norms] == [False, True]
    notes = "\n".join(outcome.report["artifact"]["notes"])
    assert "awq: input_layernorm → q_proj, k_proj, v_proj are scaled, in 1 blocks" in notes
    assert "as they are in 1 blocks: self_attn.q_proj is not quantized" in notes
    assert "smoothing chose scales for" in notes


@pytest.mark.parametrize(("family", "fmt", "step"), [
    ("llama", "gptq", {"method": "gptq", "scheme": "W4A16", "actorder": "group"}),
    ("opt", "gptq", {"method": "gptq", "scheme": "W3A16"}),
    ("gpt2", "gptq", {"method": "rtn", "scheme": "W8A16"}),
    ("falcon", "gptq", {"method": "rtn", "scheme": "W2A16"}),
    ("phi3", "awq", {"method": "awq", "scheme": "W4A16_ASYM"}),
    ("gemma3_text", "awq", {"method": "gptq", "scheme": "W4A16"}),
    ("llama", "gguf", {"method": "gptq", "scheme": "W4A16"}),
    ("mistral", "gguf", {"method": "awq", "scheme": "W4A16_ASYM"}),
    ("qwen2", "gguf", {"method": "rtn", "scheme": "W8A16"}),
    ("qwen3", "gguf", {"method": "gptq", "scheme": "W3A16"}),
    ("gemma3_text", "gguf", {"method": "gptq", "scheme": "W4A16_ASYM"}),
    ("qwen3", "fp8", {"method": "rtn", "scheme": "FP8_BLOCK", "group_size": None, "group_fallback": []}),
])  # fmt: skip
def test_formats_of_other_libraries(
    family: str, fmt: str, step: dict[str, Any], tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Request]
) -> None:
    """Written, read back, and computed alike by transformers' own modules with the decoded weights."""
    out = tmp_path / "out"
    blocks = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    if (family, fmt) == ("gemma3_text", "gguf"):
        blocks = {"layer_types": ["sliding_attention"] * 2}
    model = tiny(family, tied=True, **(blocks if fmt == "fp8" or "layer_types" in blocks else {}))
    outcome = run(write_recipe(tmp_path, text, fmt=fmt, **{"group_size": 32, **step}), model, out)
    found = outcome.report["verified"]
    assert found["max_error"] < 1e-5
    assert found["logit_error"] < (1e-1 if fmt == "fp8" else 1e-3)
    stored = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (stored["quant_method"], stored.get("desc_act", False)) == (fmt, "actorder" in step)
    names = open_checkpoint(out).files
    marks = {"fp8": ".weight_scale_inv", "gguf": (".Q4_0", ".Q4_1", ".Q8_0")}
    assert any(name.endswith(marks.get(fmt, ".qweight")) for name in names)
    planned = json.loads((out / "plan.json").read_text())
    if fmt == "gguf":  # its file holds the tokenizer too
        size = sum(tensor.size for tensor in gguf_file.contents(out / FILE).values())
    else:
        size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert planned["bytes_after"] == pytest.approx(size, rel=0.05, abs=8192)


@pytest.mark.parametrize(("family", "scheme", "method", "tied"), PAIRS)
def test_conformance(
    family: str, scheme: str, method: str, tied: bool,
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Request],
) -> None:  # fmt: skip
    blocks = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    model = tiny(family, tied=tied, **(blocks if PRESETS[scheme].weights.block_structure else {}))
    fmt = "dense" if family == "gpt2" else "compressed-tensors"
    outcome = run(write_recipe(tmp_path, text, scheme=scheme, method=method, fmt=fmt), model, tmp_path / "out")
    found = outcome.report["verified"]
    assert found["max_error"] < 1e-5
    # transformers may add up in another order, and where activations are rounded a last bit flips a code
    assert found["logit_error"] < (1e-1 if PRESETS[scheme].input_activations else 1e-2)
    assert found["top1_agreement"] > 0.9
    rows = {(r["metric"], r["subject"]): r["value"] for r in outcome.report["measurements"] if r["task"] == "heldout"}
    assert rows["kld_mean", "pair"] > 0
    bits = PRESETS[scheme].weights.num_bits
    bpw = json.loads((tmp_path / "out" / "plan.json").read_text())["bpw"]
    assert bits < bpw < bits + 2 if fmt != "dense" else bpw == 16


def test_artifact_holds_what_design_says(tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama", tied=True), model)
    (model / "README.md").write_text("the base's own words")
    (model / "extra.txt").write_text("kept byte for byte")
    (model / "pytorch_model.bin").write_bytes(b"not copied")
    out = run(write_recipe(tmp_path, text), model, tmp_path / "out").folder
    for name in ("config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "plan.json", "report.html"):
        assert (out / name).is_file(), name
    assert (out / "README.base.md").read_text() == "the base's own words"
    assert (out / "extra.txt").read_text() == "kept byte for byte"
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / ".state").exists()
    lock = read_lock(out)
    assert lock["data"]["counts"]["tokens"] == 4 * 32
    assert set(lock["stages"]) == {"compress"}
    assert "lm_head" in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert read(out)["verdict"] is None


def test_an_artifact_has_the_names_of_the_modules(
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]
) -> None:
    """GPT-2's checkpoint leaves the decoder's name out and holds masks; plain transformers loads what is made of it."""
    from safetensors.torch import load_file

    model = shutil.copytree(tiny("gpt2", tied=True), tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    spoil(model, lambda t: [t.update({name.removeprefix("transformer."): t.pop(name)}) for name in stored])
    spoil(model, lambda t: t.update({"h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    out = run(write_recipe(tmp_path, text, scheme="W8A16", fmt="dense"), model, tmp_path / "out").folder
    made = load_file(out / "model.safetensors")
    assert set(made) == {*stored, "transformer.h.0.attn.bias"}
    assert all(made[name].shape == stored[name].shape for name in stored)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_unknown_family_by_structure(
    method: str, tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]
) -> None:
    outcome = run(write_recipe(tmp_path, text, method=method), tiny("stablelm", tied=False), tmp_path / "out")
    assert outcome.report["verified"]["logit_error"] < 1e-2
    assert any("by its structure alone" in note for note in outcome.report["artifact"]["notes"])


def test_dense_equals_packed(tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]) -> None:
    model = tiny("qwen2", tied=False)
    packed = run(write_recipe(tmp_path, text, method="rtn"), model, tmp_path / "packed").folder
    dense = run(write_recipe(tmp_path, text, method="rtn", name="d", fmt="dense"), model, tmp_path / "dense").folder
    tokens = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    a, b = (stream(open_artifact(folder), tokens) for folder in (packed, dense))
    assert float((a - b).norm() / a.norm()) < 1e-2  # dense rounds the values to bfloat16
    assert "quantization_config" not in json.loads((dense / "config.json").read_text())


def test_done_is_not_done_again(
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recipe, out = tiny("llama", tied=True), write_recipe(tmp_path, text), tmp_path / "out"
    first = run(recipe, model, out)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    monkeypatch.setattr(pipeline, "walk", None)
    again = run(recipe, model, out)
    assert again.report == first.report
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


def test_another_recipe_is_made_anew(tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]) -> None:
    model, out = tiny("llama", tied=True), tmp_path / "out"
    run(write_recipe(tmp_path, text), model, out)
    four = (out / "model.safetensors").stat().st_size
    run(write_recipe(tmp_path, text, scheme="W8A16"), model, out)
    assert (out / "model.safetensors").stat().st_size > four
    assert len(verify_here) == 2


def test_folder_with_something_else_is_left_alone(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(CompressError, match="something else"):
        run(write_recipe(tmp_path, text), tiny("llama", tied=True), out)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]


def test_two_runs_in_one_folder(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out), pytest.raises(CompressError, match="another run"):
        run(write_recipe(tmp_path, text), tiny("llama", tied=True), out)


def test_not_enough_memory_or_disk(tiny: MakeTiny, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = tiny("llama", tied=True), write_recipe(tmp_path, text)
    monkeypatch.setattr(pipeline.memory, "free_disk_bytes", lambda path: 1000)
    with pytest.raises(CompressError, match="disk"):
        run(recipe, model, tmp_path / "out")
    monkeypatch.setattr(pipeline.memory, "available_memory_bytes", lambda: 1000)
    with pytest.raises(CompressError, match="memory"):
        run(recipe, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_verification_refuses_other_bytes(tiny: MakeTiny, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint that was changed after the walk is not called verified."""

    def spoil_then_verify(request: Request) -> dict[str, Any]:
        path = Path(request.artifact) / "model.safetensors"
        data = bytearray(path.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        start = 8 + length + header["model.layers.1.mlp.down_proj.weight_packed"]["data_offsets"][0]
        data[start : start + 256] = bytes(256)
        path.write_bytes(data)
        return examine(request)

    monkeypatch.setattr(pipeline, "verify", spoil_then_verify)
    with pytest.raises(CompressError, match=r"model\.layers\.1 gives other outputs"):
        run(write_recipe(tmp_path, text), tiny("llama", tied=True), tmp_path / "out")


def test_going_back_after_an_interrupted_other_recipe(
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first recipe's proof must not stand beside the second's weights."""
    model, out = tiny("llama", tied=True), tmp_path / "out"
    four, eight = write_recipe(tmp_path, text, name="four"), write_recipe(tmp_path, text, name="eight", scheme="W8A16")
    run(four, model, out)
    weights = (out / "model.safetensors").read_bytes()

    def dies(request: Request) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify", dies)
        with pytest.raises(KeyboardInterrupt):
            run(eight, model, out)
    run(four, model, out)
    assert (out / "model.safetensors").read_bytes() == weights
    assert len(verify_here) == 2


def test_what_auto_became_is_not_asked_again(
    tiny: MakeTiny, tmp_path: Path, verify_here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "auto.yaml"
    calibration = {"dataset": "auto", "samples": 2, "seq_len": 32}
    steps = [{"method": "gptq", "scheme": "W8A16"}]
    path.write_text(yaml.safe_dump({"version": 1, "summary": "a", "steps": steps, "calibration": calibration}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, out = tiny("llama", tied=True), tmp_path / "out"
    run(str(path), model, out)
    assert read_lock(out)["data"]["dataset"] == "embedded"
    monkeypatch.setattr(job, "resolve_dataset", lambda settings: job.ResolvedData("c4", "auto", "", None))
    monkeypatch.setattr(pipeline, "walk", None)
    assert run(str(path), model, out).report["verified"]["blocks"] == 2


def test_the_suite_is_checked_before_the_walk(
    tiny: MakeTiny, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text("version: 1\nsummary: s\ntext: {dataset: 'file:nowhere.txt'}\n")
    monkeypatch.setattr(pipeline, "walk", None)
    with pytest.raises(CompressError, match=r"nowhere\.txt"):
        pipeline.run(
            write_recipe(tmp_path, text), str(tiny("llama", tied=True)), tmp_path / "out",
            changes={"evaluate.suite": str(suite)}, progress=lambda *_: None,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_the_whole_run_with_measurements(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    """Every stage in its own process; a second run asks nothing of anyone."""
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        f"version: 1\nsummary: s\ntext: {{dataset: 'file:{text}', windows: 2, seq_len: 32}}\n"
        "speed: [{batch: 2, context: 16, output: 2}]\n"
    )
    arguments = (write_recipe(tmp_path, text), str(tiny("llama", tied=True)), tmp_path / "out")
    outcome = pipeline.run(*arguments, changes={"evaluate.suite": str(suite)}, progress=lambda *_: None)
    metrics = {(r["metric"], r["task"]) for r in outcome.report["measurements"]}
    for metric, task in (
        ("perplexity", "heldout"), ("perplexity", "text.txt"), ("kld_mean", "text.txt"), ("size_bytes", "checkpoint"),
        ("decode_tok_s", "speed"), ("peak_memory_bytes", "speed"), ("compress_cpu_s", "walk"),
    ):  # fmt: skip
        assert (metric, task) in metrics
    assert outcome.report["verified"]["logit_error"] < 1e-2
    assert len(outcome.report["verified"]["generated"]) == 16
    stages = {"compress", "whole", "fidelity", "accuracy", "generation", "speed"}
    assert set(read_lock(tmp_path / "out")["stages"]) == stages
    assert not (tmp_path / "out" / STATE).exists()
    again = pipeline.run(*arguments, changes={"evaluate.suite": str(suite)}, progress=lambda *_: None)
    assert again.report == outcome.report


def spoil(folder: Path, change: Any) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.layers.1.extra": torch.ones(2)}), r"model\.layers\.1\.extra is unknown"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight is \[3\], config\.json says \[64\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.int8)}), r"stored as I8"),
    ],
)
def test_weights_of_another_architecture(change: Any, said: str, tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama", tied=True), model)
    spoil(model, change)
    with pytest.raises(CompressError, match=said):
        run(write_recipe(tmp_path, text), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama", tied=True), model)
    spoil(model, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 4), float("nan")))
    with pytest.raises(CompressError, match="not finite") as caught:
        run(write_recipe(tmp_path, text), model, tmp_path / "out")
    assert caught.value.where == "model.layers.1.mlp.up_proj.weight"


def test_a_quantized_model_is_not_quantized_again(
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]
) -> None:
    recipe = write_recipe(tmp_path, text)
    once = run(recipe, tiny("llama", tied=True), tmp_path / "out").folder
    with pytest.raises(CompressError, match="quantized already"):
        run(recipe, once, tmp_path / "again")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("report.json", lambda path: path.unlink()),
        ("report.json", lambda path: path.write_text("{")),
        ("lock.json", lambda path: path.write_text("[]")),
        ("lock.json", lambda path: path.write_bytes(b"\xff\xfe")),
        ("lock.json", lambda path: path.write_text('{"stages": null}')),
    ],
)
def test_a_damaged_artifact_is_made_again(
    file: str, damage: Any, tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]
) -> None:
    model, recipe, out = tiny("llama", tied=True), write_recipe(tmp_path, text), tmp_path / "out"
    run(recipe, model, out)
    weights = (out / "model.safetensors").read_bytes()
    damage(out / file)
    assert run(recipe, model, out).report["verified"]["blocks"] == 2
    assert (out / "model.safetensors").read_bytes() == weights
    assert len(verify_here) == 2


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("progress.json", lambda path: path.write_text("{")),
        ("progress.json", lambda path: path.write_text("{}")),
        ("block-00000.safetensors", lambda path: path.write_bytes(path.read_bytes()[:50])),
        ("block-00001.safetensors", lambda path: path.unlink()),
        ("heldout.base.0", lambda path: path.unlink()),
        ("calibration.0", lambda path: path.write_bytes(b"short")),
        ("windows.safetensors", lambda path: path.write_bytes(b"short")),
        ("windows.json", lambda path: path.unlink()),
        ("data.json", lambda path: path.write_text("{")),
    ],
)
def test_a_damaged_state_begins_anew(
    file: str, damage: Any, tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any], monkeypatch: Any
) -> None:
    model, recipe = tiny("llama", tied=True), write_recipe(tmp_path, text)
    weights = (run(recipe, model, tmp_path / "whole").folder / "model.safetensors").read_bytes()

    def dies(request: Request) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify", dies)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, model, tmp_path / "out")
    damage(tmp_path / "out" / STATE / file)
    assert (run(recipe, model, tmp_path / "out").folder / "model.safetensors").read_bytes() == weights


def test_a_failing_run_leaves_the_finished_artifact(
    tiny: MakeTiny, text: Path, tmp_path: Path, verify_here: list[Any]
) -> None:
    recipe, out = write_recipe(tmp_path, text), tmp_path / "out"
    run(recipe, tiny("llama", tied=True), out)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    broken = tmp_path / "model"
    shutil.copytree(tiny("llama", tied=True), broken)
    spoil(broken, lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(float("inf")))
    with pytest.raises(CompressError, match="not finite"):
        run(recipe, broken, out)
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


def test_the_output_may_not_lie_in_the_models_folder(tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = tiny("llama", tied=True)
    with pytest.raises(CompressError, match="lies in the model's folder"):
        run(write_recipe(tmp_path, text), model, model / "sub")
    assert not (model / "sub").exists()


@pytest.mark.parametrize(
    "change", [{"hidden_act": "zork"}, {"num_attention_heads": 0}, {"hidden_size": "64"}, {"num_hidden_layers": 0}]
)
def test_a_config_that_describes_no_model(change: Any, tiny: MakeTiny, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("llama", tied=True), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CompressError, match=r"config\.json does not describe a model|no blocks"):
        run(write_recipe(tmp_path, text), model, tmp_path / "out")


def test_a_verifier_that_dies_costs_nothing_but_a_refutation_does(
    tiny: MakeTiny, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished walk is kept when the verifying process merely died, and dropped when it found a difference."""
    model, recipe, out = tiny("llama", tied=True), write_recipe(tmp_path, text), tmp_path / "out"

    def raises(error: CompressError) -> Any:
        def verify(request: Request) -> dict[str, Any]:
            raise error

        return verify

    monkeypatch.setattr(pipeline, "verify", raises(CompressError("its process ended with signal SIGKILL")))
    with pytest.raises(CompressError, match="SIGKILL"):
        run(recipe, model, out)
    assert (out / STATE / "progress.json").is_file()
    monkeypatch.setattr(pipeline, "verify", raises(Unverified("another output")))
    with pytest.raises(Unverified):
        run(recipe, model, out)
    assert not (out / STATE / "progress.json").exists()
