"""Proof that an artifact reopens as what was computed; done before any run may say "done".

In a fresh process that knows only the folders: the tensors' names are the base's, with coded weights exchanged
for their parts; every scale is finite and positive; and the held-out tokens go through the artifact, decoded
from disk block by block, and come out as they did from the walk's compressed chain, block after block. Where
the whole model fits, plain transformers loads it too, must give the same logits, and generates.

As a program it reads a request as JSON on stdin and prints its finding as JSON on the last line.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from compress.artifact import decoding_reader, open_artifact, read_schemes
from compress.calibration.walk import TRACE
from compress.errors import CompressError
from compress.evaluation.stream import stream
from compress.models.load import StreamedModel, linears, open_checkpoint
from compress.runtimes.hf import HfRuntime

TOLERANCE = 1e-3  # relative, of a block's output; the same arithmetic on the same values gives about 1e-6
LOGIT_TOLERANCE = 2e-2  # relative: a loader may round the weight it expands
WHOLE_TOKENS = 64
GENERATED = 16


@dataclass(frozen=True)
class Request:
    """What to verify: folders as text, held-out tokens [H, T], and whether to load the whole model."""

    artifact: str
    base: str
    state: str
    tokens: list[list[int]]
    whole: bool
    threads: int


def verify(request: Request) -> dict[str, Any]:
    """Verifies in a fresh process.

    Returns:
        `blocks`, `max_error` (relative, of any block), `tensors`, and for a whole reload `logit_error`,
        `top1_agreement` and the `generated` token ids.
    Raises:
        CompressError: the artifact is not what was computed, with the first difference.
    """
    done = subprocess.run(
        [sys.executable, "-m", "compress.verify"],
        input=json.dumps(request.__dict__), capture_output=True, text=True, check=False,
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    last = done.stdout.strip().rsplit("\n", 1)[-1]
    if done.returncode == 0:
        finding: dict[str, Any] = json.loads(last)
        return finding
    why = json.loads(last)["refused"] if done.returncode == 3 else "\n".join(done.stderr.splitlines()[-5:])
    raise CompressError(
        f"verification failed: {why}",
        where=request.artifact,
        hint="the artifact must not be used; please report it",
    )


def main() -> int:
    """The worker."""
    request = Request(**json.load(sys.stdin))
    torch.set_num_threads(request.threads)
    try:
        finding = examine(request)
    except CompressError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")
        return 3
    sys.stdout.write(json.dumps(finding) + "\n")
    return 0


def examine(request: Request) -> dict[str, Any]:
    """Verifies in this process; see `verify`."""
    folder = Path(request.artifact)
    model = open_artifact(folder)
    finding: dict[str, Any] = {"tensors": _check_tensors(folder, Path(request.base), model)}
    tokens_HT = torch.tensor(request.tokens)
    state = Path(request.state)
    errors: list[float] = []

    def compare(index: int, hidden_HTD: Tensor) -> None:
        with safe_open(state / f"block-{index:05d}.safetensors", framework="pt", backend="pread") as file:
            trace_HD = file.get_tensor(TRACE)
        error = float((hidden_HTD[:, -1] - trace_HD).norm() / trace_HD.norm())
        if not error <= TOLERANCE:  # also when it is not a number
            raise CompressError(f"{model.block_name(index)} gives other outputs from disk: error {error:.2g}")
        errors.append(error)

    hidden_HTD = stream(model, tokens_HT, visit=compare)
    finding |= {"blocks": len(errors), "max_error": max(errors)}
    if request.whole:
        finding |= _check_whole(folder, model, hidden_HTD[:1, :WHOLE_TOKENS], tokens_HT[:1, :WHOLE_TOKENS], request)
    return finding


def _check_tensors(folder: Path, base: Path, model: StreamedModel) -> int:
    """Key sets and scales; the number of tensors."""
    config = json.loads((folder / "config.json").read_text())
    fmt, schemes = read_schemes(config, [name for name, _, _ in linears(model.skeleton)])
    checkpoint = open_checkpoint(folder)
    names = set(checkpoint.files)
    if fmt is not None:
        for name, scheme in schemes.items():
            stored = checkpoint.read(checkpoint.below(name))
            names -= {f"{name}.{part}" for part in fmt.parts}
            names.add(f"{name}.weight")
            for part, tensor in stored.items():
                if part.endswith("_scale") and not bool((tensor.isfinite() & (tensor > 0)).all()):
                    raise CompressError(f"{part} holds a scale that is not finite and positive")
            decoding_reader(checkpoint, fmt, {name: scheme})(name)
    expected = set(open_checkpoint(base).files)
    if names != expected:
        odd = ", ".join(sorted(names ^ expected)[:4])
        raise CompressError(f"the artifact's tensors are not the base's: {odd}")
    return len(checkpoint.files)


def _check_whole(
    folder: Path, model: StreamedModel, hidden_1TD: Tensor, tokens_1T: Tensor, request: Request
) -> dict[str, Any]:
    """Loads the folder with plain transformers, compares logits, generates."""
    ours_TV = model.head()(hidden_1TD)[0]
    runtime = HfRuntime()
    runtime.load(folder, threads=request.threads, dtype="float32")
    theirs_TV = runtime.logits(tokens_1T)[0].float()
    error = float((ours_TV - theirs_TV).norm() / ours_TV.norm())
    agreement = float((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).float().mean())
    if not error <= LOGIT_TOLERANCE:
        raise CompressError(f"transformers computes other logits from the artifact: relative error {error:.2g}")
    generated = runtime.generate(tokens_1T, GENERATED)[0].tolist()
    return {"logit_error": error, "top1_agreement": agreement, "generated": generated}


if __name__ == "__main__":
    raise SystemExit(main())
