"""Run a checkpoint folder with plain transformers on the CPU: the reference that other runtimes agree with.

Decoding is a plain greedy loop over a key-value cache, one forward pass a token: what is timed is what is written
here, and nothing of `generate()`'s own bookkeeping.

A compressed-tensors checkpoint loads compressed and is decompressed on its first forward pass: that pass is
slow once, and from then on the weights are as large as the base's. This runtime shows that an artifact is
right; it does not show how fast packed weights can be.

Left out: other devices than the CPU, code from the checkpoint (`trust_remote_code` is off).
"""

import contextlib
import functools
import gc
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.activations import wire_inputs
from compress.artifact import CodedModel, open_artifact, switch_cache_on
from compress.errors import CompressError, nearest
from compress.evaluation.memory import available_memory_bytes, peak_rss_bytes
from compress.formats.base import INPUT_SCALE
from compress.formats.compressed_tensors import EXPANDED_ONLY, import_library, read_cache
from compress.models.checkpoint import open_checkpoint
from compress.runtimes.base import Clock, DoesNotFit, Facts

_DECODED = ("gptq", "awq", "fp8", "gguf")
DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Opened:
    """A model that is ready to run, and how it holds its weights: see `Facts`."""

    model: Any
    weights: str
    kernels: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class HfRuntime:
    """`Runtime` by transformers' `AutoModelForCausalLM` on the CPU.

    Args:
        open_model: makes the model of a checkpoint folder, in a dtype, with coded weights expanded or not.
    """

    device = "cpu"
    vocab_size = 0

    def __init__(self, open_model: "Callable[[Path, torch.dtype, bool], Opened] | None" = None) -> None:
        self._open = open_model or open_plain
        self._opened: Opened | None = None
        self._model: Any = None
        self._cache: Any = None
        self._next_B1: Tensor | None = None

    def prepare(self, path: Path) -> None:
        """Import the model's classes by building it without memory (meta device).

        Raises:
            CompressError: the folder is no checkpoint that transformers knows.
        """
        import transformers

        auto: Any = transformers.AutoModelForCausalLM  # its own types are partly wrong
        require_folder(path)
        with _readable_errors(path):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            if getattr(config, "quantization_config", None) and not is_decoded(path):
                import_library()
            with torch.device("meta"):
                auto.from_config(config, trust_remote_code=False)

    def load(self, path: Path, *, threads: int, dtype: str = "bfloat16", expand: bool = False) -> None:
        """Load the checkpoint folder `path`; sets torch's thread count for this process.

        Args:
            expand: decode coded weights now, by our own code, where that reads the checkpoint.

        Raises:
            CompressError: unknown dtype, no such folder, a checkpoint that transformers refuses, or one whose
                weights do not fill the model (transformers would fill the rest with random numbers).
        """
        if dtype not in DTYPES:
            raise CompressError(f"Unknown dtype {dtype!r}: {nearest(dtype, DTYPES)}")
        if threads < 1:
            raise CompressError(f"threads must be at least 1, not {threads}")
        require_folder(path)
        self.unload()
        torch.set_num_threads(threads)
        self._opened = self._open(path, DTYPES[dtype], expand)
        self._model = self._opened.model.eval()
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        """Process the prompts and choose each one's first new token; last position's logits `[B, V]`."""
        with torch.inference_mode():
            return self._step(tokens_BT, cache=None)

    def decode(self, n: int) -> Tensor:
        """Feed the token chosen last and choose the next, `n` times; the chosen tokens `[B, n]`, int64."""
        assert self._next_B1 is not None, "decode continues a prefill"
        assert n >= 1
        chosen: list[Tensor] = []
        with torch.inference_mode():
            for _ in range(n):
                self._step(self._next_B1, cache=self._cache)
                chosen.append(self._next_B1)
        return torch.cat(chosen, dim=1)

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Feed tokens of the caller's choice after what the cache holds; last position's logits `[B, V]`."""
        assert self._cache is not None, "extend continues a prefill"
        with torch.inference_mode():
            return self._step(tokens_BT, cache=self._cache)

    def follow(self, rows_R: Tensor | None, tokens_RT: Tensor) -> Tensor:
        """Go on from chosen rows of the cache, which then holds the result; logits `[R, T, V]`."""
        assert self._cache is not None, "follow continues a prefill"
        with torch.inference_mode():
            if rows_R is not None:
                self._cache.reorder_cache(rows_R)
            out = self._model(input_ids=tokens_RT, cache=self._cache, use_cache=True)
            self._cache = out.cache
            logits_RTV: Tensor = out.logits
            return logits_RTV

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """The logits of every position `[B, T, V]`, in the dtype of `load`."""
        assert self._model is not None, "load first"
        with torch.inference_mode():
            logits: Tensor = self._model(input_ids=tokens_BT, use_cache=False).logits
            return logits

    def generate(self, tokens_BT: Tensor, n: int) -> Tensor:
        """`n` greedy tokens after each prompt `[B, n]`; the end token does not stop it."""
        self.prefill(tokens_BT)
        assert self._next_B1 is not None
        assert n >= 1
        first_B1 = self._next_B1
        return first_B1 if n == 1 else torch.cat([first_B1, self.decode(n - 1)], dim=1)

    def timed(self, tokens_BT: Tensor, n: int, clock: Clock) -> list[float]:
        """Readings of the clock at the start and when each of n + 1 tokens was there.

        Raises:
            DoesNotFit: keys and values would take more than the free memory, or memory ran out.
        """
        need = tokens_BT.shape[0] * (tokens_BT.shape[1] + n) * self._kv_bytes()
        if need > available_memory_bytes():
            raise DoesNotFit(f"keys and values need {need / 1e9:.1f} GB")
        try:
            marks = [clock()]
            self.prefill(tokens_BT)
            marks.append(clock())
            for _ in range(n):
                self.decode(1)
                marks.append(clock())
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            self._cache = None
            raise DoesNotFit(str(error).splitlines()[0]) from error
        return marks

    def facts(self) -> Facts:
        """How the loaded model holds its weights, and the process's peak."""
        assert self._opened is not None, "load first"
        ends = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        every = tensor_bytes(self._model)
        decoding = every - sum(getattr(module, "second_bytes", 0) for module in self._model.modules())
        tied = ends[1] is not None and getattr(ends[1], "weight", None) is ends[0].weight
        return Facts(
            weights=self._opened.weights, kernels=self._opened.kernels, notes=self._opened.notes, weight_bytes=every,
            read_bytes=decoding if tied else decoding - tensor_bytes(ends[0]), peak_bytes=peak_rss_bytes(),
            kv_bytes_per_token=self._kv_bytes(), multiplied=_multiplied(self._model, ends[1]),
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        )  # fmt: skip

    def _kv_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * size * self._model.dtype.itemsize)

    def unload(self) -> None:
        """Drop the model and its cache."""
        self._model = self._cache = self._next_B1 = self._opened = None
        gc.collect()  # modules of transformers hold reference cycles

    def _step(self, tokens_BT: Tensor, cache: Any) -> Tensor:
        assert self._model is not None, "load first"
        out = self._model(input_ids=tokens_BT, cache=cache, use_cache=True, logits_to_keep=1)
        logits_BV: Tensor = out.logits[:, -1]
        self._cache, self._next_B1 = out.cache, logits_BV.argmax(dim=-1, keepdim=True)
        return logits_BV


def open_plain(path: Path, dtype: torch.dtype, expand: bool) -> Opened:
    """The model as plain transformers loads it; of formats that it does not read here, with our decoded weights.

    Raises:
        CompressError: transformers refuses the checkpoint, or its weights do not fill the model (transformers would
            fill the rest with random numbers).
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    decoded = is_decoded(path) or (expand and _is_read(path))
    with _readable_errors(path), _quiet():
        if decoded:
            model, info = _of_decoded(path, dtype)
        else:
            model, info = auto.from_pretrained(
                path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False,
                output_loading_info=True, **_expanding(path),
            )  # fmt: skip
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise CompressError(
            f"{len(absent)} weights of the model are not in the checkpoint, first {absent[0]}",
            where=str(path), hint="make or download the checkpoint again; it would run on random weights",
        )  # fmt: skip
    if not decoded:
        _cast_expanded(model, path, dtype)
    _quantize_cache(model, path)
    stored, name = quant_method(path), str(dtype).removeprefix("torch.")
    return Opened(model, name if stored is None else f"{stored}, expanded to {name} in memory")


def _multiplied(model: torch.nn.Module, head: torch.nn.Module | None) -> int:
    """Weights of linear layers but the head, each layer once."""
    layers = [module for module in model.modules() if module is not head]
    shapes = [(getattr(m, "in_features", None), getattr(m, "out_features", None)) for m in layers]
    conv1d: list[Any] = [m for m in layers if type(m).__name__ == "Conv1D"]  # GPT-2's, as plain transformers has it
    products = sum(i * o for i, o in shapes if isinstance(i, int) and isinstance(o, int))
    return products + sum(int(m.weight.numel()) for m in conv1d)


def tensor_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@functools.cache
def parameter_count(path: Path) -> int:
    """Parameters of the model that a folder's config.json describes, a tied head counted once; reads no weights."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    require_folder(path)
    with _readable_errors(path), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model = auto.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def is_decoded(path: Path) -> bool:
    """Whether a checkpoint's weights are decoded here, by our own code.

    Of gptq and awq, since the packages by which transformers reads them clash with ours; of fp8, since on CPUs
    transformers leaves activations as they are. `make interop` loads the same files with their own loaders.
    """
    return quant_method(path) in _DECODED


def quant_method(path: Path) -> str | None:
    """The format that a checkpoint's config.json names; None for an ordinary one."""
    settings = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    return settings.get("quant_method")


def _of_decoded(path: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """transformers' ordinary model of a checkpoint's decoded weights, and what it says of loading them."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    coded = open_artifact(path)
    assert isinstance(coded, CodedModel)
    blocks = [coded.block_name(i) for i in range(coded.block_count)]
    inside = tuple(f"{block}." for block in blocks)
    ends = dict.fromkeys(n.rpartition(".")[0] for n in coded.checkpoint.files if not n.startswith(inside))
    weights = {
        name: tensor.to(dtype) for part in (*blocks, *ends) for name, tensor in coded.stored(coded.reader(part)).items()
    }
    with torch.device("meta"):
        kind: Any = type(auto.from_config(config, trust_remote_code=False))
    model, info = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True)
    for name, rounding in wire_inputs(model, "", coded.schemes).items():
        part = f"{name}.{INPUT_SCALE}"
        rounding.switch_on(None if rounding.args.dynamic else coded.checkpoint.read([part])[part].float())
    return model, info


def _is_read(path: Path) -> bool:
    """Whether a checkpoint's weights are coded in a way that our own code reads."""
    try:
        return isinstance(open_artifact(path), CodedModel)
    except CompressError:
        return False


def _expanding(path: Path) -> dict[str, Any]:
    """Options that expand weights while loading, where transformers' ordinary way finds none that fit.

    compressed-tensors 0.19 to 0.20.1 gives the packed zero points of asymmetric weights a wrong shape on the meta
    device; and a Falcon's own linear layers are initialised by their weights, which are not there.
    """
    config = json.loads((path / "config.json").read_text())
    settings = config.get("quantization_config") or {}
    groups = settings.get("config_groups", {}).values()
    symmetric = all((group.get("weights") or {}).get("symmetric", True) for group in groups)
    if settings.get("quant_method") != "compressed-tensors":
        return {}
    if symmetric and config.get("model_type") not in EXPANDED_ONLY:
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _cast_expanded(model: Any, path: Path, dtype: torch.dtype) -> None:
    """Expands 4-bit floats now, in the dtype of the rest: compressed-tensors 0.20.1 makes them bfloat16 always."""
    layouts = (json.loads((path / "config.json").read_text()).get("quantization_config") or {}).get("config_groups", {})
    if dtype == torch.bfloat16 or not any("fp4" in str(group.get("format")) for group in layouts.values()):
        return
    model.hf_quantizer.compressor.decompress_model(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.dtype != dtype:
            module.weight.data = module.weight.data.to(dtype)


def _quantize_cache(model: Any, path: Path) -> None:
    """Makes attention layers quantize keys and values as config.json says, where compressed-tensors did not see to it.

    Its 0.20.1 knows attention layers by an argument called `past_key_values`, which transformers 5.24 calls `cache`.
    """
    settings = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    args = read_cache(settings) if settings.get("quant_method") == "compressed-tensors" else None
    if args is not None and not any(hasattr(module, "kv_cache") for module in model.modules()):
        switch_cache_on(model, "", args, open_checkpoint(path))


def require_folder(path: Path) -> None:
    """Refuses what is no folder of a model: transformers would take it for a name on the hub.

    Raises:
        CompressError: no config.json is there.
    """
    if not (path / "config.json").is_file():
        raise CompressError("No checkpoint here: config.json is missing", where=str(path),
                            hint="give the folder of a model or of an artifact")  # fmt: skip


@contextlib.contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """transformers' and safetensors' refusals of a checkpoint, as ours."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompressError(f"transformers cannot load this checkpoint: {lines[0]}", where=str(path)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no remark of the loading library while inside: a library does not write to the terminal.

    What it remarks on are tensors that it does not know, such as a cache's scales; absent ones are looked for here.
    """
    import transformers

    logging: Any = transformers.utils.logging  # untyped
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
