"""Proof that an artifact reopens as what was computed; done before any run may say "done".

In a fresh process that knows only the folders: the tensors' names are the base's, with coded weights exchanged
for their parts; every scale is finite and positive; and the held-out tokens go through the artifact, decoded
from disk block by block, and come out as they did from the walk's compressed chain, block after block. Where
the whole model fits, plain transformers loads it too, must give the same logits, and generates.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from compress.artifact import CodedModel, decoding_reader, open_artifact, read_schemes
from compress.calibration.state import TRACE
from compress.errors import CompressError
from compress.evaluation.stream import stream
from compress.models.checkpoint import open_checkpoint
from compress.models.load import StreamedModel, linears
from compress.runtimes.hf import HfRuntime, is_decoded
from compress.schemes import CACHE_SCALES
from compress.workers import call, serve

TOLERANCE = 1e-3  # relative, of a block's output: another order of sums, through all blocks, has given 1e-4
LOGIT_TOLERANCE = 2e-2  # relative: a loader may round the weight it expands
# Where activations are rounded, a last bit that differs may round the other way, and within a few layers the
# difference is as large as the rounding itself: 2^-4 of single values in FP8. The same arithmetic still gives 0.
ROUNDED_TOLERANCE, ROUNDED_LOGIT_TOLERANCE = 3e-2, 1e-1
WHOLE_TOKENS = 64
GENERATED = 16


class Unverified(CompressError):
    """The artifact is not what was computed."""


@dataclass(frozen=True)
class Request:
    """What to verify.

    Attributes:
        artifact, base: folders.
        state: the finished walk's folder, to compare with block by block; None when it is gone.
        tokens: the walk's held-out windows [H, T], or any others when there is no state.
        whole: also load the whole artifact with plain transformers.
        threads: of the worker.
    """

    artifact: str
    base: str
    state: str | None
    tokens: list[list[int]]
    whole: bool
    threads: int


def verify(request: Request) -> dict[str, Any]:
    """Verifies in a fresh process.

    Returns:
        `blocks`, `max_error` (relative, of any block), `tensors`, and for a whole reload `logit_error`,
        `top1_agreement` and the `generated` token ids.
    Raises:
        Unverified: the artifact is not what was computed, with the first difference.
        CompressError: the worker died, which says nothing of the artifact.
    """
    finding: dict[str, Any] = call(
        "compress.verify", request.__dict__, what="verifying the artifact", where=request.artifact
    )
    if "differs" in finding:
        raise Unverified(**finding["differs"])
    return finding


def examine(request: Request) -> dict[str, Any]:
    """Verifies in this process; see `verify`."""
    folder = Path(request.artifact)
    model = open_artifact(folder)
    tokens_HT = torch.tensor(request.tokens)
    finding: dict[str, Any] = {}
    if request.state is not None:
        finding |= {"tensors": _check_tensors(folder, Path(request.base), model)}
        finding |= _check_blocks(folder, model, tokens_HT, Path(request.state))
    if request.whole:
        finding |= _check_whole(folder, model, tokens_HT[:1, :WHOLE_TOKENS], request.threads)
    return finding


def _check_blocks(folder: Path, model: StreamedModel, tokens_HT: Tensor, state: Path) -> dict[str, Any]:
    """Every block's outputs, decoded from disk, against the walk's compressed chain."""
    errors: list[float] = []
    tolerance = ROUNDED_TOLERANCE if _rounds(model) else TOLERANCE

    def compare(index: int, hidden_HTD: Tensor) -> None:
        with safe_open(state / f"block-{index:05d}.safetensors", framework="pt", backend="pread") as file:
            trace_HD = file.get_tensor(TRACE)
        error = float((hidden_HTD[:, -1] - trace_HD).norm() / trace_HD.norm().clamp_min(1e-30))
        if not error <= tolerance:  # also when it is not a number
            raise _differs(f"{model.block_name(index)} gives other outputs from disk: error {error:.2g}", folder)
        errors.append(error)

    stream(model, tokens_HT, visit=compare)
    return {"blocks": len(errors), "max_error": max(errors)}


def _rounds(model: StreamedModel) -> bool:
    return isinstance(model, CodedModel) and model.rounds


def _differs(what: str, folder: Path) -> Unverified:
    return Unverified(
        f"verification failed: {what}", where=str(folder), hint="do not use the artifact; run again, and report it"
    )


def _check_tensors(folder: Path, base: Path, model: StreamedModel) -> int:
    """Key sets and scales; the number of tensors."""
    config = json.loads((folder / "config.json").read_text())
    fmt, schemes = read_schemes(config, [name for name, _, _ in linears(model.skeleton)])
    checkpoint = model.fit(open_checkpoint(folder))
    names = {name for name in checkpoint.files if not name.endswith(CACHE_SCALES)}
    if fmt is not None:
        for name, scheme in schemes.items():
            stored = checkpoint.read(checkpoint.below(name))
            names -= {f"{name}.{part}" for part in fmt.parts}
            names.add(f"{name}.weight")
            for part, tensor in stored.items():
                scale = tensor.float()  # torch does not compare float8
                if "scale" in part.rsplit(".", 1)[-1] and not bool((scale.isfinite() & (scale > 0)).all()):
                    raise _differs(f"{part} holds a scale that is not finite and positive", folder)
            if not bool(decoding_reader(checkpoint, fmt, {name: scheme})(name)[f"{name}.weight"].isfinite().all()):
                raise _differs(f"{name} holds values that are not finite", folder)
    expected = {name for name in model.fit(open_checkpoint(base)).files if not name.endswith(model.ignored)}
    names = {name for name in names if not name.endswith(model.ignored)}
    if names != expected:
        odd = ", ".join(sorted(names ^ expected)[:4])
        raise _differs(f"the artifact's tensors are not the base's: {odd}", folder)
    return len(checkpoint.files)


def _check_whole(folder: Path, model: StreamedModel, tokens_1T: Tensor, threads: int) -> dict[str, Any]:
    """Loads the folder with plain transformers (or its modules, see `is_decoded`), compares logits, generates."""
    ours_TV = model.head()(stream(model, tokens_1T))[0]
    runtime = HfRuntime()
    runtime.load(folder, threads=threads, dtype="float32")
    theirs_TV = runtime.logits(tokens_1T)[0].float()
    error = float((ours_TV - theirs_TV).norm() / ours_TV.norm())
    agreement = float((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).float().mean())
    if not error <= (ROUNDED_LOGIT_TOLERANCE if _rounds(model) else LOGIT_TOLERANCE):
        raise _differs(f"transformers computes other logits: relative error {error:.2g}", folder)
    generated = runtime.generate(tokens_1T, GENERATED)[0].tolist()
    return {
        "logit_error": error, "top1_agreement": agreement, "generated": generated, "decoded": is_decoded(folder)
    }  # fmt: skip


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The worker."""
    torch.set_num_threads(request["threads"])
    try:
        return examine(Request(**request))
    except Unverified as error:
        return {"differs": {"what": error.what, "where": error.where, "hint": error.hint}}


if __name__ == "__main__":
    raise SystemExit(serve(answer))
