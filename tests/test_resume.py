"""SIGKILL at many points, then the same command again: the same bytes as an uninterrupted run.

And the memory law: peak anonymous memory does not grow with the number of blocks.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeTiny
from tests.test_pipeline import write_recipe

ROOT = Path(__file__).parents[1]

# One interpreter, which forks a child for each run: imports are paid once. A child kills itself at its n-th
# call that touches the disk.
KILLER = """
import hashlib, json, os, signal, sys, traceback
from pathlib import Path
from compress import pipeline
from compress.verify import examine
pipeline.verify = examine
recipe, model, out, points = json.loads(sys.argv[1])

def child(out, kill_at):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0
    def counted(call):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped
    for name in ("pwrite", "replace", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    code = 1
    try:
        pipeline.run(recipe, model, Path(out), evaluate=False, progress=lambda *_: None)
        (Path(out) / "calls").write_text(str(calls)) if kill_at == 0 else None
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

def digest(out):
    names = ("model.safetensors", "config.json", "plan.json")
    return [hashlib.sha256((Path(out) / n).read_bytes()).hexdigest() for n in names]

assert child(out, 0) == 0
calls = int((Path(out) / "calls").read_text())
result = {"calls": calls, "whole": digest(out), "resumed": {}}
for share in points:
    at, target = max(1, round(share * calls)), f"{out}-{share}"
    status = child(target, at)
    assert os.WIFSIGNALED(status), (share, status)
    again = child(target, max(1, calls // 3)) if share == points[0] else None  # killed twice
    assert child(target, 0) == 0
    result["resumed"][str(share)] = digest(target)
print(json.dumps(result))
"""

MEASURE = """
import json, sys
from pathlib import Path
from compress import pipeline
from compress.evaluation.memory import PeakAnonymous
pipeline.verify = lambda request: {"blocks": 0, "max_error": 0.0}
recipe, model, out = json.loads(sys.argv[1])
with PeakAnonymous(interval_s=0.002) as peak:
    pipeline.run(recipe, model, Path(out), evaluate=False, progress=lambda *_: None)
print(peak.peak_bytes)
"""


def python(program: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().rsplit("\n", 1)[-1]


def sample_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(" ".join(f"word{(i * i) % 97} is not {i % 13}." for i in range(3000)))
    return path


def test_killed_runs_end_with_the_same_bytes(tiny: MakeTiny, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, sample_text(tmp_path))
    model = tiny("llama", tied=True, layers=3)
    points = [0.1, 0.35, 0.6, 0.8, 0.97]
    result = json.loads(python(KILLER, recipe, str(model), str(tmp_path / "out"), points))
    assert result["calls"] > 30
    for share, digests in result["resumed"].items():
        assert digests == result["whole"], f"killed at {share} of the run"


@pytest.mark.parametrize("method", ["gptq"])
def test_memory_does_not_grow_with_depth(method: str, tiny: MakeTiny, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, sample_text(tmp_path), method=method)
    peaks = {}
    for layers in (4, 24):
        model = tiny("llama", tied=True, layers=layers, hidden_size=512, intermediate_size=1024)
        peaks[layers] = int(python(MEASURE, recipe, str(model), str(tmp_path / f"out{layers}")))
    block = 4 * (512 * 512 * 3 + 3 * 512 * 1024)
    assert peaks[24] - peaks[4] < 3 * block, {k: f"{v / 1e6:.1f} MB" for k, v in peaks.items()}
