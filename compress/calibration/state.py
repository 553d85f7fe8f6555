"""What a walk leaves in the artifact's `.state`: chains, a file for each finished block, a record of how far it is.

A commit is one atomic rename of the record; what an interrupted run left behind is taken up from there, or, where it is
damaged, begun anew.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.calibration.chain import Chain
from compress.evaluation.memory import peak_rss_bytes
from compress.files import replace

TRACE = "__trace__"  # a block file's extra tensor: held-out outputs at each window's last token, [H, D]


@dataclass
class State:
    """The resumable state in a folder: chains, finished blocks, and one record of how far it is.

    Attributes:
        folder: the artifact's `.state`.
        base, compressed: held-out chains, float32.
        calibration: the calibration tokens' chain, bfloat16; None when no method needs statistics.
        blocks: a record for each finished block.
        cost: CPU seconds, wall seconds and peak resident bytes so far, over all runs that it took.
    """

    folder: Path
    base: Chain
    compressed: Chain
    calibration: Chain | None
    blocks: list[dict[str, Any]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=lambda: {"cpu_s": 0.0, "wall_s": 0.0, "peak_bytes": 0})
    _mark: tuple[float, float] = field(default_factory=lambda: (time.process_time(), time.perf_counter()))

    def chains(self) -> list[Chain]:
        return [c for c in (self.base, self.compressed, self.calibration) if c is not None]

    def block_file(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def commit(self) -> None:
        """Makes what was written since the last commit permanent, by one atomic rename."""
        now = (time.process_time(), time.perf_counter())
        self.cost["cpu_s"] += now[0] - self._mark[0]
        self.cost["wall_s"] += now[1] - self._mark[1]
        self.cost["peak_bytes"] = max(self.cost["peak_bytes"], peak_rss_bytes())
        self._mark = now
        record = {"blocks": self.blocks, "parity": self.base.parity, "cost": self.cost}
        replace(self.folder / "progress.json", json.dumps(record).encode())

    @property
    def started(self) -> bool:
        return (self.folder / "progress.json").is_file()


def open_state(folder: Path, windows: tuple[Tensor, Tensor], hidden_size: int, statistics: bool) -> State | None:
    """The state in `folder`, as far as an earlier run got; None when what it left is damaged.

    Args:
        windows: calibration and held-out tokens, int64 [N, T] and [H, T].
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens_NT, heldout_HT = windows
    shape = (*heldout_HT.shape, hidden_size)
    state = State(
        folder=folder,
        base=Chain(folder / "heldout.base", shape, torch.float32),
        compressed=Chain(folder / "heldout.compressed", shape, torch.float32),
        calibration=Chain(folder / "calibration", (*tokens_NT.shape, hidden_size), torch.bfloat16)
        if statistics
        else None,
    )
    if state.started:
        try:
            record = json.loads((folder / "progress.json").read_bytes())
            state.blocks, state.cost = record["blocks"], record["cost"]
            for chain in state.chains():
                chain.parity = record["parity"]
            whole = all(chain.is_whole() for chain in state.chains())
            for index in range(len(state.blocks)):
                with safe_open(state.block_file(index), framework="pt", backend="pread") as file:
                    whole = whole and TRACE in file.keys()  # noqa: SIM118  # not a mapping
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return None
        return state if whole else None
    return state
