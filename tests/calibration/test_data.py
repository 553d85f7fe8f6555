"""Calibration data: what `auto` becomes, windows cut from every kind of source, refusals."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from compress.calibration import embedded, hub_sets
from compress.calibration.data import (
    Calibration,
    ResolvedData,
    Windows,
    embedded_text,
    evaluation_windows,
    load_windows,
    resolve_dataset,
)
from compress.errors import CompressError

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


def make_tokenizer(*, bos: bool = False, template: str | None = None, **kwargs: Any) -> Any:
    """A byte-level tokenizer without merges: one token a byte, `<s>` in front if asked."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", **kwargs
    )
    tokenizer.chat_template = template
    return tokenizer


PLAIN, WITH_BOS = make_tokenizer(), make_tokenizer(bos=True)
CHAT = make_tokenizer(bos=True, template=TEMPLATE)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache, and no variable that forbids the network."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))


def words(seed: int, count: int) -> str:
    """Text in which no window repeats."""
    return " ".join(hashlib.sha256(f"{seed}/{i}".encode()).hexdigest()[:7] for i in range(count))


def text_file(tmp_path: Path, text: str, name: str = "a.txt") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return f"file:{path}"


def jsonl_file(tmp_path: Path, records: list[Any], name: str = "a.jsonl") -> str:
    return text_file(tmp_path, "".join(json.dumps(r) + "\n" for r in records), name)


def parquet_file(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return f"file:{path}"


def load(dataset: str, tokenizer: Any = PLAIN, *, heldout: int = 2, **section: Any) -> Windows:
    calibration = Calibration(dataset=dataset, **{"samples": 4, "seq_len": 16, **section})
    return load_windows(resolve_dataset(calibration), calibration, tokenizer, heldout=heldout)


def refused(call: Callable[[], Any], *parts: str) -> None:
    """`call` raises a CompressError that says all of `parts` and what to do."""
    with pytest.raises(CompressError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))
    assert caught.value.hint


# ------------------------------------------------------------------------------------------------ resolve


def test_the_section_is_frozen_and_closed() -> None:
    assert Calibration() == Calibration(dataset="auto", samples=128, seq_len=512, seed=0)
    for wrong in ({"samples": 0}, {"seq_len": 7}, {"sample": 3}):
        with pytest.raises(ValidationError):
            Calibration(**wrong)
    with pytest.raises(ValidationError):
        Calibration().samples = 3


def test_auto_is_the_hub_where_it_answers_and_embedded_elsewhere() -> None:
    here = resolve_dataset(Calibration(), online=lambda: True)
    assert here == ResolvedData("ultrachat", "auto", "hub reachable", None)
    away = resolve_dataset(Calibration(), online=lambda: False)
    assert (away.dataset, away.asked) == ("embedded", "auto")
    assert away.reason == "hub not reachable; embedded text used"
    assert away.sha256 == hashlib.sha256(embedded_text("calibration").encode()).hexdigest()


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    resolved = resolve_dataset(Calibration(), online=lambda: pytest.fail("asked"))
    assert resolved.dataset == "embedded"
    assert name in resolved.reason
    refused(lambda: resolve_dataset(Calibration(dataset="c4")), "c4", name, "embedded", "file:")


def test_named_sets_resolve_to_themselves_without_asking_when_local() -> None:
    assert resolve_dataset(Calibration(dataset="self")) == ResolvedData("self", "self", "", None)
    embedded = resolve_dataset(Calibration(dataset="embedded"), online=lambda: pytest.fail("asked"))
    assert (embedded.dataset, embedded.reason) == ("embedded", "")
    for alias in hub_sets.HUB_SETS:
        assert resolve_dataset(Calibration(dataset=alias), online=lambda: True).dataset == alias


def test_a_file_resolves_to_its_absolute_path_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    resolved = resolve_dataset(Calibration(dataset="file:a.txt"))
    expected = hashlib.sha256(b"some text").hexdigest()
    assert resolved == ResolvedData(f"file:{tmp_path / 'a.txt'}", "file:a.txt", "", expected)


def test_refusals_before_any_work(tmp_path: Path) -> None:
    def resolve(dataset: str) -> Callable[[], Any]:
        return lambda: resolve_dataset(Calibration(dataset=dataset), online=lambda: False)

    with pytest.raises(CompressError, match=r"unknown dataset 'ultrachta'; did you mean 'ultrachat'"):
        resolve("ultrachta")()
    refused(resolve("texts/a.txt"), "unknown dataset", "file:texts/a.txt")
    refused(resolve("wikitext2"), "wikitext2", "not reachable", "embedded", "file:")
    refused(resolve(f"file:{tmp_path}/none.txt"), "No such file", "none.txt")
    refused(resolve(f"file:{tmp_path}"), "Is a directory")
    refused(resolve(text_file(tmp_path, " \n\n ")), "is empty")


class _Hub(BaseHTTPRequestHandler):
    commit: str | None = "8049631c405ae6576f93f445c6b8166f76f5505a"

    def do_HEAD(self) -> None:
        self.send_response(200 if "ultrachat" in self.path else 404)
        if self.commit:
            self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


class _Portal(_Hub):
    commit = None


@pytest.mark.parametrize(("handler", "expected"), [(_Hub, "ultrachat"), (_Portal, "embedded")])
def test_the_probe_asks_the_hub(monkeypatch: pytest.MonkeyPatch, handler: Any, expected: str) -> None:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        assert resolve_dataset(Calibration()).dataset == expected
        refused(lambda: resolve_dataset(Calibration(dataset="c4")), "not reachable")
        server.shutdown()


# -------------------------------------------------------------------------------------------------- text


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 6),
    heldout=st.integers(0, 4),
    seq_len=st.integers(8, 20),
    bos=st.booleans(),
    extra=st.integers(0, 30),
)
def test_a_text_file_is_cut_into_the_consecutive_windows_of_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, samples: int, heldout: int, seq_len: int, bos: bool, extra: int
) -> None:
    tokenizer = WITH_BOS if bos else PLAIN
    n = samples + heldout
    text = words(0, n * seq_len)[: n * seq_len - bos + extra]
    dataset = text_file(tmp_path_factory.mktemp("text"), text)
    got = load(dataset, tokenizer, samples=samples, heldout=heldout, seq_len=seq_len)
    expected_NT = torch.tensor(tokenizer(text).input_ids[: n * seq_len]).reshape(n, seq_len)
    assert got.tokens_NT.dtype == got.heldout_NT.dtype == torch.int64
    assert torch.equal(got.tokens_NT, expected_NT[:samples])
    assert torch.equal(got.heldout_NT, expected_NT[samples:])
    assert got.counts["tokens"] == samples * seq_len
    assert got.counts["heldout_tokens"] == heldout * seq_len
    assert got.counts["bos"] == int(bos)
    assert got.counts["unique_windows"] == n
    assert got.counts["available_tokens"] == len(text) + bos


def test_the_seed_plays_no_part_in_a_text_file(tmp_path: Path) -> None:
    dataset = text_file(tmp_path, words(0, 100))
    assert load(dataset, seed=0).sha256 == load(dataset, seed=5).sha256


def test_repeated_windows_are_dropped_and_counted(tmp_path: Path) -> None:
    page, other = words(0, 2) + " ", words(1, 100)
    assert len(page) == 16
    got = load(text_file(tmp_path, page * 5 + other))
    assert got.counts["duplicate_windows"] == 4
    both_NT = torch.cat([got.tokens_NT, got.heldout_NT])
    assert len(both_NT.unique(dim=0)) == len(both_NT) == got.counts["unique_windows"] == 6
    assert PLAIN.decode(both_NT[0]) == page
    assert PLAIN.decode(both_NT[1:].flatten()) == other[: 5 * 16]


def test_too_short_says_what_there_is_and_what_is_needed(tmp_path: Path) -> None:
    dataset = text_file(tmp_path, words(0, 100)[:80])
    refused(lambda: load(dataset), "80 tokens", "need 96 tokens", "samples: 3", "seq_len: 13")
    load(dataset, samples=3)
    load(dataset, seq_len=13)
    refused(lambda: load(text_file(tmp_path, (words(0, 2) + " ") * 20, "b.txt")), "repeated ones dropped")
    refused(lambda: load(text_file(tmp_path, "x", "c.txt")), "1 tokens", "a shorter seq_len", "another dataset")


def test_a_byte_order_mark_is_no_text_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbf" + b"a\r\n" + words(0, 100).encode())
    got = load(f"file:{tmp_path}/bom.txt")
    assert PLAIN.decode(got.tokens_NT[0]).startswith("a\r\n")


def test_text_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line\ncaf\xe9\n")
    refused(lambda: load(f"file:{tmp_path}/latin.txt"), "UTF-8", "latin.txt", "position 8")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = text_file(tmp_path, "secret")

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    refused(lambda: load(dataset), "cannot read", "Permission denied")


def test_a_text_that_spells_bos_does_not_double_it(tmp_path: Path) -> None:
    text = "<s>" + words(0, 100)
    assert WITH_BOS(text).input_ids[:2] == [0, 0]
    got = load(text_file(tmp_path, text), WITH_BOS)
    assert got.tokens_NT[0, :2].tolist()[0] == 0
    assert got.counts["bos"] == 1


# --------------------------------------------------------------------------------------- many documents


def letters(got: torch.Tensor) -> set[str]:
    """The capital letters in the tokens: each document below is marked by one."""
    return set(re.findall("[A-Z]", PLAIN.decode(got.flatten())))


def marked(count: int, words_each: int = 6) -> list[str]:
    """Documents whose every word ends in their own capital letter."""
    return [words(i, words_each).replace(" ", chr(65 + i) + " ") for i in range(count)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), samples=st.integers(1, 8), heldout=st.integers(1, 4), bos=st.booleans())
def test_heldout_windows_come_from_other_documents(
    tmp_path_factory: pytest.TempPathFactory, seed: int, samples: int, heldout: int, bos: bool
) -> None:
    records = [{"text": text} for text in marked(20)]
    dataset = jsonl_file(tmp_path_factory.mktemp("jsonl"), records)
    section = {"seed": seed, "samples": samples, "heldout": heldout}
    got = load(dataset, WITH_BOS if bos else PLAIN, **section)
    assert got.tokens_NT.shape == (samples, 16)
    assert got.heldout_NT.shape == (heldout, 16)
    assert not letters(got.tokens_NT) & letters(got.heldout_NT)
    assert got.counts["shared_documents"] == 0
    again = load(dataset, WITH_BOS if bos else PLAIN, **section)
    assert (again.sha256, again.counts) == (got.sha256, got.counts)


def test_the_seed_orders_the_documents_and_the_global_one_is_left_alone(tmp_path: Path) -> None:
    dataset = jsonl_file(tmp_path, [{"text": text} for text in marked(20)])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    hashes = {load(dataset, seed=seed).sha256 for seed in range(6)}
    assert len(hashes) == 6
    assert torch.equal(before, torch.get_rng_state())


def test_the_hash_is_of_shapes_and_bytes(tmp_path: Path) -> None:
    dataset = text_file(tmp_path, words(0, 100))
    hashes = [load(dataset, samples=s, heldout=h).sha256 for s, h in ((4, 2), (4, 2), (3, 3), (2, 4))]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_documents_are_joined_each_with_its_special_tokens(tmp_path: Path) -> None:
    texts = marked(12)
    got = load(jsonl_file(tmp_path, [{"text": t} for t in texts]), WITH_BOS, samples=8)
    stream = got.tokens_NT.flatten().tolist()
    assert stream[0] == 0
    starts = [i for i, token in enumerate(stream) if token == 0]
    assert len(starts) == got.counts["bos"] == got.counts["documents"]
    for start, stop in itertools.pairwise(starts):
        assert PLAIN.decode(stream[start + 1 : stop]) in texts


def test_too_few_documents_share_and_say_so(tmp_path: Path) -> None:
    dataset = jsonl_file(tmp_path, [{"text": text} for text in marked(1, 100)])
    got = load(dataset)
    assert got.counts["shared_documents"] == 1
    both_NT = torch.cat([got.tokens_NT, got.heldout_NT])
    assert PLAIN.decode(both_NT.flatten()) == marked(1, 100)[0][: 6 * 16]
    short = jsonl_file(tmp_path, [{"text": text} for text in marked(3, 3)], "b.jsonl")
    refused(lambda: load(short), "tokens", "need 96 tokens")


def test_repeated_and_blank_documents_are_dropped(tmp_path: Path) -> None:
    texts = marked(4, 5)
    dataset = jsonl_file(tmp_path, [{"text": t} for t in [*texts, "", None, "  ", *texts]])
    got = load(dataset, samples=6, heldout=0)
    assert got.counts["documents"] <= 4
    refused(lambda: load(dataset, samples=20, heldout=0), f"{sum(map(len, texts))} tokens")


def test_parquet_and_jsonl_of_the_same_rows_agree(tmp_path: Path) -> None:
    rows = [{"text": text, "id": i} for i, text in enumerate(marked(15))]
    one = load(jsonl_file(tmp_path, rows), seed=4)
    two = load(parquet_file(tmp_path / "a.parquet", rows), seed=4)
    assert one.sha256 == two.sha256


def conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]}
        for text in marked(count)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_go_through_the_chat_template(tmp_path: Path, kind: str) -> None:
    rows = conversations(15)
    dataset = jsonl_file(tmp_path, rows) if kind == "jsonl" else parquet_file(tmp_path / "a.parquet", rows)
    got = load(dataset, CHAT)
    first = PLAIN.decode(got.tokens_NT.flatten())
    assert first.startswith("<s>[user] ")  # the template forgot BOS; the tokenizer begins with one
    assert "\n[assistant] " in first
    assert got.counts["bos"] == got.counts["documents"]
    refused(lambda: load(dataset, WITH_BOS), "no chat template", "text column")


def test_a_template_that_writes_bos_does_not_double_it(tmp_path: Path) -> None:
    dataset = jsonl_file(tmp_path, conversations(15))
    writes = make_tokenizer(bos=True, template="{{ bos_token }}" + TEMPLATE)
    assert load(dataset, writes).sha256 == load(dataset, CHAT).sha256
    adds_none = make_tokenizer(template=TEMPLATE)
    assert load(dataset, adds_none).counts["bos"] == 0


def test_a_template_that_refuses(tmp_path: Path) -> None:
    dataset = jsonl_file(tmp_path, conversations(15))
    picky = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    refused(lambda: load(dataset, picky), "roles must alternate", "a.jsonl:")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (['{"text": "a"}', "{oops"], ["not JSON", "a.jsonl:2"]),
        (['{"text": "a"}', "[1]"], ["not a JSON object", "a.jsonl:2"]),
        (['{"txt": "a", "id": 1}'], ["txt, id", "a.jsonl:1"]),
        (['{"text": "a"}', "", '{"body": "b"}'], ["no `text`", "body", "a.jsonl:3"]),
        (['{"text": 3}'], ["not a string", "a.jsonl:1"]),
        (['{"messages": "hello"}'], ["not a list", "a.jsonl:1"]),
        (['{"messages": [{"content": "x"}]}'], ["not a list of {role, content}", "a.jsonl:1"]),
        (['{"text": "\\ud800"}'], ["surrogate", "a.jsonl:1"]),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: list[str], parts: list[str]) -> None:
    dataset = text_file(tmp_path, "\n".join(lines) + "\n", "a.jsonl")
    refused(lambda: load(dataset, CHAT), *parts)


def test_bad_bytes_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    refused(lambda: load(f"file:{tmp_path}/a.jsonl"), "UTF-8", "a.jsonl:2")


def test_bad_parquet(tmp_path: Path) -> None:
    refused(lambda: load(text_file(tmp_path, "no parquet at all", "a.parquet")), "not a parquet file")
    refused(lambda: load(parquet_file(tmp_path / "b.parquet", [{"body": "x", "n": 1}])), "body, n")
    refused(lambda: load(parquet_file(tmp_path / "c.parquet", [{"text": 1}])), "not a string", "row 0")


# -------------------------------------------------------------------------------------------------- hub


def cache_hub_set(alias: str, rows: list[dict[str, Any]], monkeypatch: Any, root: Path) -> None:
    """A hub cache as a download leaves it, with `rows` as the set's file."""
    hub_set = hub_sets.HUB_SETS[alias]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    folder = root / f"datasets--{hub_set.repo.replace('/', '--')}" / "snapshots" / hub_set.revision
    parquet_file(folder / hub_set.file, rows)


def test_a_cached_set_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache_hub_set("ultrachat", conversations(20), monkeypatch, tmp_path / "hub")
    calibration = Calibration(samples=4, seq_len=16)
    resolved = resolve_dataset(calibration, online=lambda: pytest.fail("asked"))
    assert (resolved.dataset, resolved.sha256) == ("ultrachat", None)
    assert "cache" in resolved.reason
    got = load_windows(resolved, calibration, CHAT, heldout=2)
    assert PLAIN.decode(got.tokens_NT[0]).startswith("<s>[user] ")
    assert not letters(got.tokens_NT) & letters(got.heldout_NT)
    assert got.counts["untemplated_documents"] == 0
    # nobody chose conversations under `auto`: a base model gets their plain texts, counted
    plain = load_windows(resolved, calibration, WITH_BOS, heldout=2)
    assert plain.counts["untemplated_documents"] == plain.counts["documents"] + plain.counts["heldout_documents"]
    refused(lambda: load("ultrachat", WITH_BOS), "no chat template")


def test_a_block_of_a_streamed_set_is_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def rows(alias: str) -> Any:
        for i in range(10_000):
            taken.append(i)
            yield {"text": words(i, 6)}

    monkeypatch.setattr(hub_sets, "_rows", rows)
    calibration = Calibration(dataset="c4", samples=4, seq_len=16)
    resolved = ResolvedData("c4", "c4", "", None)
    one = load_windows(resolved, calibration, PLAIN, heldout=2)
    assert len(taken) == hub_sets.BLOCK
    other = load_windows(resolved, calibration.model_copy(update={"seed": 1}), PLAIN, heldout=2)
    assert one.sha256 != other.sha256


def test_wikitext_lines_become_articles() -> None:
    lines = ["", " = One = \n", "", " text \n", " = = Part = = \n", " more \n", " = Two = \n", " end \n"]
    assert list(hub_sets._articles(lines)) == [
        " = One = \n text \n = = Part = = \n more \n",
        " = Two = \n end \n",
    ]


def test_the_hub_lost_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    calibration = Calibration(dataset="c4")
    for error in (OSError("connection reset"), HfHubHTTPError.__bases__[0]("connection reset")):

        def lost(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", lost)
        refused(
            lambda: load_windows(ResolvedData("c4", "c4", "", None), calibration, PLAIN, heldout=2),
            "connection reset",
            "allenai/c4",
            "embedded",
        )


# ------------------------------------------------------------------------------------------- self, embedded


def test_self_draws_from_the_model() -> None:
    calls: list[tuple[int, int, int]] = []

    def generate(n: int, seq_len: int, seed: int) -> torch.Tensor:
        calls.append((n, seq_len, seed))
        rng = torch.Generator().manual_seed(seed)
        tokens_NT = torch.randint(0, 200, (n, seq_len), generator=rng)
        tokens_NT[-1] = tokens_NT[0]  # one repeat a round, unless it is the only one
        return tokens_NT

    calibration = Calibration(dataset="self", samples=4, seq_len=16, seed=7)
    resolved = resolve_dataset(calibration)
    got = load_windows(resolved, calibration, PLAIN, heldout=2, generate=generate)
    assert calls == [(6, 16, 7), (6, 16, 8)]
    assert got.tokens_NT.shape == (4, 16)
    assert got.heldout_NT.shape == (2, 16)
    assert got.counts["duplicate_windows"] == 1
    refused(lambda: load_windows(resolved, calibration, PLAIN, heldout=2), "self", "another dataset")

    def stuck(n: int, seq_len: int, seed: int) -> torch.Tensor:
        return torch.ones(n, seq_len, dtype=torch.int32)

    refused(lambda: load_windows(resolved, calibration, PLAIN, heldout=2, generate=stuck), "repeated ones dropped")


def test_the_embedded_parts_share_no_paragraph_and_nothing_is_lost() -> None:
    from pydoc_data.topics import topics

    calibration, evaluation = embedded_text("calibration"), embedded_text("evaluation")
    assert not embedded.long_paragraphs(calibration) & embedded.long_paragraphs(evaluation)
    for text in topics.values():
        assert (text in calibration) != (text in evaluation)
    share = len(calibration) / (len(calibration) + len(evaluation))
    assert 0.75 < share < 0.82


def test_a_fresh_process_splits_the_same_and_imports_nothing_heavy() -> None:
    code = (
        "import hashlib, sys; from compress.calibration.data import embedded_text;"
        "print(hashlib.sha256(embedded_text('calibration').encode()).hexdigest());"
        "print([m for m in ('datasets', 'pyarrow', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = resolve_dataset(Calibration(dataset="embedded")).sha256
    assert run.stdout.split("\n")[:2] == [here, "[]"]


def test_groups_join_repeats() -> None:
    long = "a paragraph that is long enough to be counted as one that two topics share"
    topics = {"b": f"x\n\n{long}", "a": f"{long}\n \ny", "c": "short", "d": "the short one", "e": "alone"}
    assert embedded._groups(topics) == {"a": "a", "b": "a", "c": "c", "d": "c", "e": "e"}


def test_embedded_heldout_repeats_nothing_that_calibration_read() -> None:
    got = load("embedded", samples=64, seq_len=512, heldout=8)
    assert got.counts["shared_documents"] == 0
    calibration = PLAIN.decode(got.tokens_NT.flatten())
    assert not embedded.long_paragraphs(calibration) & embedded.long_paragraphs(PLAIN.decode(got.heldout_NT.flatten()))
    assert PLAIN.decode(got.tokens_NT[0])[:200] not in embedded_text("evaluation")


# ------------------------------------------------------------------------------------------ the tokenizer


def saved(tokenizer: Any, folder: Path) -> dict[str, bytes]:
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_tokenizer_is_left_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE, model_max_length=16)
    tokenizer.backend_tokenizer.enable_truncation(9, stride=2)
    tokenizer.backend_tokenizer.enable_padding(length=12, pad_id=1, pad_token="</s>")
    before, said = saved(tokenizer, tmp_path / "before"), dict(tokenizer.deprecation_warnings)
    text = words(0, 100)
    assert load(text_file(tmp_path, text), tokenizer).counts["available_tokens"] == len(text) + 1
    load(jsonl_file(tmp_path, conversations(15)), tokenizer)
    evaluation_windows(tokenizer, text, windows=3, seq_len=16)
    refused(lambda: load(text_file(tmp_path, "x", "short.txt"), tokenizer), "too short")
    assert saved(tokenizer, tmp_path / "after") == before
    assert tokenizer.deprecation_warnings == said
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_evaluation_windows() -> None:
    text = words(0, 20)
    got_NT = evaluation_windows(WITH_BOS, text, windows=5, seq_len=20)
    assert got_NT.dtype == torch.int64
    assert torch.equal(got_NT, torch.tensor(WITH_BOS(text).input_ids[:100]).reshape(5, 20))
    refused(lambda: evaluation_windows(WITH_BOS, text, windows=9, seq_len=20), "160 tokens", "180", "at most 8")
