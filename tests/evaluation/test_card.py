"""The model card: front matter that the hub reads, results that are numbers, and nothing of a stranger's as markup."""

import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from report_example import EVIL, SPEED, make_lone, make_report

from compress.evaluation.card import card, reads_vllm
from compress.evaluation.metrics import row


def parts(text: str) -> tuple[dict[str, Any], str]:
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_front_matter_and_body() -> None:
    rows = [row("size_bytes", "base", "checkpoint", 538e6), row("size_bytes", "artifact", "checkpoint", 156e6),
            row("peak_memory_bytes", "artifact", "speed", 8e8, conditions=SPEED)]  # fmt: skip
    front, body = parts(card(make_report(rows, loaders=["vLLM"]), "gptq-4bit", "version: 1\n", "apache-2.0"))
    assert front == {
        "base_model": "org/tiny", "base_model_relation": "quantized", "library_name": "transformers",
        "license": "apache-2.0", "tags": ["compress", "quantized", "gptq", "4-bit", "compressed-tensors"],
        "pipeline_tag": "text-generation",
    }  # fmt: skip
    assert 'name = "tiny--gptq-4bit"' in body
    assert "vllm serve tiny--gptq-4bit" in body
    assert "| checkpoint | 538 MB | 156 MB | 0.29× | – | – |" in body
    assert "```yaml\nversion: 1\n```" in body
    assert "- hardware: CPU × 2" in body
    assert "**Undecided.** Accuracy changed by −0.84 pp" in body
    assert "![" not in body


def test_the_hub_reads_it() -> None:
    loaded = ModelCard(card(make_report(), "gptq-4bit", "version: 1\n", "apache-2.0"), ignore_metadata_errors=False)
    data = loaded.data
    assert data.base_model == "org/tiny"
    assert data.license == "apache-2.0"
    assert data.model_name == "tiny--gptq-4bit"
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results or []}
    assert found["embedded", "perplexity"] == 16.251
    assert found["wikitext", "word_perplexity"] == 30.9
    assert 0.4 < found["arc_easy", "acc_norm"] < 0.8
    assert {r.task_type for r in data.eval_results or []} == {"text-generation"}
    assert len(found) == 13


def test_only_numbers_are_results() -> None:
    rows = [row("perplexity", "artifact", "t", None), row("perplexity", "base", "t", 2.0), row("acc", "base", "u", 0.5)]
    front, _ = parts(card(make_report(rows), "r", None, None))
    assert "model-index" not in front
    assert front["tags"]


def test_a_result_names_its_dataset_where_that_is_known() -> None:
    rows = [row("acc", "artifact", "arc_easy", 0.5, context={"dataset": "allenai/ai2_arc"})]
    front, _ = parts(card(make_report(rows), "r", None, None))
    assert front["model-index"][0]["results"][0]["dataset"] == {"name": "arc_easy", "type": "allenai/ai2_arc"}


def test_pictures_are_those_that_exist() -> None:
    pictures = [("Accuracy by task", "charts/accuracy.png"), ("Decode speed", "charts/decode.png")]
    _, body = parts(card(make_report(), "r", "", None, pictures))
    assert re.findall(r"!\[(.*?)\]\((.*?)\)", body) == pictures


def test_without_license_or_hub_name() -> None:
    text = card(make_report(base="/somewhere/private/tiny"), "r", "", None)
    front, _ = parts(text)
    assert not {"license", "base_model", "base_model_relation"} & set(front)
    assert "private" not in text


@pytest.mark.parametrize(
    ("known", "base", "wanted"),
    [
        ({}, "org/tiny", {"license": "other", "license_link": "https://huggingface.co/org/tiny"}),
        ({}, "/local/tiny", {"license": "other"}),
        ({"license_name": "gemma-ish", "license_link": "LICENSE"}, "org/tiny",
         {"license": "other", "license_name": "gemma-ish", "license_link": "LICENSE"}),
    ],
)  # fmt: skip
def test_a_license_that_the_hub_does_not_know(known: dict[str, str], base: str, wanted: dict[str, str]) -> None:
    report = make_report(base=base)
    report["base"] |= known
    front, _ = parts(card(report, "r", "", "other"))
    assert {key: value for key, value in front.items() if key.startswith("license")} == wanted
    front, _ = parts(card(make_report(base="/local/tiny"), "r", "", "Their Own [1]"))
    assert (front["license"], front["license_name"]) == ("other", "Their Own [1]")


@pytest.mark.parametrize(
    ("artifact", "reads"),
    [
        ({"loaders": ["transformers", "vLLM"]}, True),
        ({"format": "dense"}, True),
        ({}, False),
        ({"loaders": ["llama.cpp"]}, False),
    ],
)
def test_vllm_is_named_where_it_is_a_loader(artifact: dict[str, Any], reads: bool) -> None:
    report = make_report([], **artifact)
    assert reads_vllm(report) is reads
    assert ("vllm serve" in card(report, "r", "", None)) is reads


def test_asymmetric_weights_are_loaded_as_they_must_be() -> None:
    _, body = parts(card(make_report([], scheme=["int4 asym group 64"]), "r", "", None))
    assert 'dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True))' in body
    _, body = parts(card(make_report([], scheme=["int4 asym group 64"], format="dense"), "r", "", None))
    assert "CompressedTensorsConfig" not in body
    assert "pip install transformers`" in body


def test_a_gguf_file_is_run_by_llama_cpp() -> None:
    report = make_report([], format="gguf", loaders=["llama.cpp", "Ollama"])
    front, body = parts(card(report, "r", "", None))
    assert front["library_name"] == "gguf"
    assert "llama-cli -m model.gguf" in body
    assert f"ollama create {report['artifact']['name']} -f Modelfile" in body
    assert "from_pretrained" not in body
    assert "vllm" not in body


def test_one_checkpoint() -> None:
    front, body = parts(card(make_lone(), "r", None, "mit"))
    assert "base_model" not in front
    assert "One checkpoint, measured alone." in body
    assert "| checkpoint | 156 MB | – | – |" in body
    assert "## Recipe" not in body
    assert not re.search(r"\| base|KLD mean", body)


def test_strangers_words_are_no_markup() -> None:
    report = make_report(name=EVIL, base=EVIL, notes=[EVIL + "\n# head"], scheme=[EVIL], recipe=EVIL)
    report["verdict"]["rule"] = EVIL
    report["measurements"].append(row("acc", "artifact", EVIL, 0.5, conditions={"hardware": EVIL}))
    text = card(report, EVIL, "```\n<script>", "x: [")
    front, body = parts(text)
    assert front["license_name"] == "x: ["
    assert ModelCard(text).data.model_name == EVIL
    outside = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", body)
    assert "<script" not in outside
    assert "<img" not in outside
    assert "[a](" not in outside
    assert "\n# head" not in outside
    assert "````yaml\n```\n<script>\n````" in body
