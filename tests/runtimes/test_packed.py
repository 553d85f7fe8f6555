"""The fast runtime: every scheme and format gives the reference's logits, by the kernels that the table says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compress
from compress import convert, pipeline
from compress.errors import CompressError
from compress.numerics import QuantizedWeight, dequantize, qparams, quantize, quantize_activations
from compress.runtimes import crossover as crossovers
from compress.runtimes import kernels, packed
from compress.runtimes.hf import HfRuntime
from compress.runtimes.packed import PackedLinear, PackedRuntime
from compress.schemes import PRESETS, QuantArgs, Scheme
from tests.conftest import FAMILY_NAMES, MakeTiny


def nothing(stage: str, done: int, total: int) -> None:
    del stage, done, total


TOKENS_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_here: object) -> None:
    del verify_here
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))


def coded(shape: tuple[int, int], args: QuantArgs, *, size: float = 0.02, seed: int = 0) -> QuantizedWeight:
    """Random normal weights, rounded to nearest."""
    w_OI = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    w_OGg = w_OI.view(shape[0], -1, args.span(shape[1]))
    scale_OG, zero_OG = qparams(w_OGg.amin(-1), w_OGg.amax(-1), args)
    zero = 0.0 if zero_OG is None else zero_OG.float().unsqueeze(-1)
    q_OI = quantize(w_OGg, scale_OG.unsqueeze(-1), zero, args).view(shape).to(torch.int8)
    return QuantizedWeight(q_OI, scale_OG, zero_OG)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def groups(size: int, bits: int = 4, symmetric: bool = True) -> Scheme:
    return Scheme(weights=QuantArgs(num_bits=bits, strategy="group", group_size=size, symmetric=symmetric))


CODINGS = {
    **{name: PRESETS[name] for name in ("W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W8A8_STATIC")},
    "groups of 32": groups(32), "groups of 64, asymmetric": groups(64, symmetric=False),
    "3 bits by channel": Scheme(weights=QuantArgs(num_bits=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("shape", [(192, 256), (100, 128), (2304, 128)])  # 100: no multiple of the rows of a tile
@pytest.mark.parametrize("size", [0.02, 1e-6, 40.0])  # the last two have scales that float16 cannot hold
def test_kernels_multiply(name: str, shape: tuple[int, int], size: float) -> None:
    scheme = CODINGS[name]
    weight = coded(shape, scheme.weights, size=size)
    inputs = scheme.input_activations
    if inputs is not None and not inputs.dynamic:
        weight = QuantizedWeight(weight.q_OI, weight.scale, None, input_scale=torch.tensor([0.02]))
    held, _ = kernels.how_held(scheme, shape)
    chosen = kernels.line("cpu", held)
    x_NI = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    seen_NI = x_NI.double() if inputs is None else quantize_activations(x_NI.float(), inputs, weight.input_scale)
    expected_NO = seen_NI.double() @ dequantize(weight).double().t()
    for kernel in {chosen.few, chosen.many}:
        found_NO = kernels.pack(kernel, weight, scheme, "here").product(x_NI)
        assert found_NO.dtype == torch.bfloat16
        assert found_NO.shape == expected_NO.shape
        assert error(found_NO, expected_NO) < 2**-8, kernel


@pytest.mark.parametrize(
    ("scheme", "held"),
    [
        (PRESETS["W4A16"], "int4"), (PRESETS["W3A16"], "int4"), (PRESETS["Q4_K"], "int4"), (PRESETS["W8A16"], "int8"),
        (PRESETS["W8A8"], "int8×int8"), (PRESETS["FP8_DYNAMIC"], "bfloat16"), (PRESETS["NVFP4A16"], "bfloat16"),
        (PRESETS["Q6_K"], "bfloat16"), (groups(32, bits=8), "bfloat16"), (groups(16), "bfloat16"),
    ],
)  # fmt: skip
def test_how_schemes_are_held(scheme: Scheme, held: str) -> None:
    found, why = kernels.how_held(scheme, (64, 256))
    assert found == held
    assert bool(why) == (held == "bfloat16")


def test_a_layout_that_has_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffled(weight: QuantizedWeight, scheme: Scheme) -> kernels.Packed:
        return kernels.int4pack(QuantizedWeight(weight.q_OI.roll(1, 1), weight.scale, weight.zero), scheme)

    monkeypatch.setitem(kernels.KERNELS, "int4pack", shuffled)
    scheme = PRESETS["W4A16"]
    with pytest.raises(CompressError, match="does not compute this weight") as caught:
        kernels.pack("int4pack", coded((64, 128), scheme.weights), scheme, "model.layers.0")
    assert caught.value.where == "model.layers.0"


def test_rows_choose_the_kernel() -> None:
    scheme = PRESETS["W4A16"]
    layer = PackedLinear(coded((64, 128), scheme.weights), scheme, None, "here")
    assert layer.kernels == ("int4pack", "int4expand")
    called: list[str] = []
    layer._few = lambda x_NI: called.append("few") or x_NI.new_zeros(len(x_NI), 64)  # type: ignore[func-returns-value]
    layer._many = lambda x_NI: called.append("many") or x_NI.new_zeros(len(x_NI), 64)  # type: ignore[func-returns-value]
    layer.crossover = 4
    for rows in (1, 4, 5):
        assert layer(torch.ones(rows, 1, 128, dtype=torch.bfloat16)).shape == (rows, 1, 64)
    assert called == ["few", "few", "many"]


def test_the_crossover_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def seconds(product: Any, x_NI: Tensor) -> float:
        taken.append(len(x_NI))
        return len(x_NI) if product is few else 20

    def few(x_NI: Tensor) -> Tensor:
        return x_NI

    monkeypatch.setattr(crossovers, "_seconds", seconds)
    assert crossovers.crossover(few, abs, ("int4", 64, 128, 32)) == 16
    assert sorted(set(taken)) == [2, 4, 8, 16, 32]
    taken.clear()
    assert crossovers.crossover(few, abs, ("int4", 64, 128, 32)) == 16
    assert not taken
    assert crossovers.crossover(few, abs, ("int4", 64, 128, 64)) == 16
    assert taken
    file = tmp_path / "cache" / "crossovers.json"
    assert len(json.loads(file.read_text())) == 2
    file.write_text("{")
    assert crossovers.crossover(few, abs, ("int4", 64, 128, 32)) == 16


RECIPES = {
    "W4A16": "{method: rtn, scheme: W4A16, group_size: 32}",
    "W4A16_ASYM": "{method: rtn, scheme: W4A16_ASYM, group_size: 32}",
    "W3A16": "{method: rtn, scheme: W3A16, group_size: 32}",
    "W2A16": "{method: rtn, scheme: W2A16, group_size: 32}",
    "W8A16": "{method: rtn, scheme: W8A16}",
    "W8A8": "{method: rtn, scheme: W8A8}",
    "W8A8_STATIC": "{method: rtn, scheme: W8A8_STATIC}",
    "FP8_DYNAMIC": "{method: rtn, scheme: FP8_DYNAMIC}",
    "FP8": "{method: rtn, scheme: FP8}",
    "NVFP4A16": "{method: rtn, scheme: NVFP4A16}",
    "MXFP4A16": "{method: rtn, scheme: MXFP4A16}",
}  # fmt: skip
ROUND = {"W8A8", "W8A8_STATIC", "FP8_DYNAMIC", "FP8"}  # a step of an input's code more or less, by bfloat16's rounding


def artifact(folder: Path, out: Path, step: str, fmt: str = "compressed-tensors", cache: str = "null") -> Path:
    recipe = out.with_suffix(".yaml")
    recipe.write_text(
        f"version: 1\nsummary: s\nsteps: [{step}]\nformat: {fmt}\nkv_cache: {cache}\n"
        "calibration: {dataset: embedded, samples: 4, seq_len: 16}\n"
    )
    pipeline.run(str(recipe), str(folder), out, evaluate=False, progress=nothing)
    return out


def reference(path: Path, dtype: str = "float32") -> Tensor:
    runtime = HfRuntime()
    runtime.load(path, threads=1, dtype=dtype, expand=True)
    return runtime.logits(TOKENS_BT).double()


def close(path: Path, bound: float | None) -> PackedRuntime:
    """Whole, and token by token after a prompt; without a bound at most twice plain transformers' error in bfloat16."""
    expected_BTV = reference(path)
    most = bound or 2 * error(reference(path, "bfloat16"), expected_BTV)
    runtime = PackedRuntime()
    runtime.load(path, threads=1)
    assert error(runtime.logits(TOKENS_BT), expected_BTV) < most
    runtime.prefill(TOKENS_BT[:, :20])
    steps = [runtime.extend(TOKENS_BT[:, at : at + 1]) for at in range(20, 24)]
    assert error(torch.stack(steps, 1), expected_BTV[:, 20:]) < most
    return runtime


@pytest.mark.parametrize("name", RECIPES)
def test_every_scheme_agrees_with_the_reference(name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    path = artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES[name])
    runtime = close(path, None if name in ROUND else 0.03)
    facts = runtime.facts()
    held, _ = kernels.how_held(next(iter(packed.open_artifact(path).schemes.values())), (64, 64))  # type: ignore[attr-defined]
    if held == "bfloat16":
        assert facts.kernels == {}
        assert "expanded" in facts.weights
    else:
        assert facts.kernels == {kernels.line("cpu", held).few: 8}  # two blocks: qkv, o, gate and up, down
        assert f"{held} packed (14 layers)" in facts.weights
    assert bool(facts.notes) == (held == "int4")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_agrees_with_the_reference(family: str, tiny: MakeTiny, tmp_path: Path) -> None:
    fmt = "gptq" if family == "gpt2" else "compressed-tensors"
    close(artifact(tiny(family, tied=False), tmp_path / "made", RECIPES["W4A16"], fmt), 0.03)


@pytest.mark.parametrize("fmt", ["gptq", "awq", "gguf"])
def test_every_format_agrees_with_the_reference(fmt: str, tiny: MakeTiny, tmp_path: Path) -> None:
    made = artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES["W4A16"])
    close(convert.convert(made, fmt, tmp_path / fmt, nothing).folder, 0.03)


def test_columns_in_the_order_of_their_groups(tiny: MakeTiny, tmp_path: Path) -> None:
    step = "{method: gptq, scheme: W4A16, group_size: 32, actorder: group}"
    close(artifact(tiny("llama", tied=True), tmp_path / "made", step, "gptq"), 0.03)


def test_a_quantized_cache_is_one(tiny: MakeTiny, tmp_path: Path) -> None:
    close(artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES["W4A16"], cache="FP8"), None)


def test_a_plain_model_runs_as_it_is(tiny: MakeTiny) -> None:
    path = tiny("qwen2", tied=True)  # with biases on q, k and v
    runtime = close(path, 0.03)
    plain = HfRuntime()
    plain.load(path, threads=1)
    assert error(runtime.logits(TOKENS_BT), plain.logits(TOKENS_BT).double()) < 0.01
    assert runtime.facts().weights == "bfloat16"
    assert runtime.facts().weight_bytes == plain.facts().weight_bytes


def test_in_other_dtypes_everything_is_expanded(tiny: MakeTiny, tmp_path: Path) -> None:
    path = artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES["W4A16"])
    runtime = PackedRuntime()
    runtime.load(path, threads=1, dtype="float32")
    assert error(runtime.logits(TOKENS_BT), reference(path)) < 1e-5
    assert not runtime.facts().kernels


def test_load_gives_a_model_that_generates(tiny: MakeTiny, tmp_path: Path) -> None:
    path = artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES["W4A16"])
    model = compress.load(path)
    assert type(model).__name__ == "LlamaForCausalLM"
    out = model(input_ids=TOKENS_BT, use_cache=True)
    assert out.logits.shape == (2, 24, 320)
    written = model.generate(TOKENS_BT, max_new_tokens=6, do_sample=False, eos_token_id=None)
    runtime = PackedRuntime()
    runtime.load(path, threads=1)
    assert torch.equal(written[:, 24:], runtime.generate(TOKENS_BT, 6))


def test_a_head_of_8_bits(tiny: MakeTiny, tmp_path: Path) -> None:
    path = artifact(tiny("llama", tied=True), tmp_path / "made", RECIPES["W4A16"])
    plain, rounded = PackedRuntime(), packed.packed_head8()
    plain.load(path, threads=1)
    rounded.load(path, threads=1)
    off = error(rounded.logits(TOKENS_BT), plain.logits(TOKENS_BT).double())
    assert 0 < off < 0.02
    assert rounded.facts().kernels == {"int4pack": 8, "int8pack": 1}
    assert "head" in rounded.facts().weights
    assert rounded.facts().read_bytes < plain.facts().read_bytes


def test_layers_of_different_schemes_are_not_joined(tiny: MakeTiny, tmp_path: Path) -> None:
    step = (
        "{method: rtn, scheme: W4A16, group_size: 32, overrides: ["
        '{match: "*.k_proj", scheme: W8A16}, {match: "*.q_proj", scheme: dense}]}'
    )
    runtime = close(artifact(tiny("llama", tied=True), tmp_path / "made", step), 0.03)
    assert runtime.facts().kernels == {"int4pack": 8, "int8pack": 2}


def test_what_was_asked_before_is_not_kept_for_another(tiny: MakeTiny) -> None:
    """Joined layers hand out the outputs of one call; a second call of the first computes anew."""
    model = compress.load(tiny("llama", tied=True))
    attention = model.model.layers[0].self_attn
    x = torch.ones(1, 1, 64, dtype=torch.bfloat16)
    first = attention.q_proj(x).clone()
    x.mul_(2)
    assert torch.equal(attention.q_proj(x), first * 2)
    assert attention.v_proj(x * 3).shape == (1, 1, 32)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"config\.json is missing"):
        compress.load(tmp_path)


def test_absent_weights(tiny: MakeTiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny("llama", tied=True) / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    (tmp_path / "config.json").write_text((tiny("llama", tied=True) / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CompressError, match=r"1 weights of the model are not in the checkpoint.*down_proj"):
        compress.load(tmp_path)
