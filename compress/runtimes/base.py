"""What runs a model: one interface for everything that measures one.

The idea: speed, fidelity, accuracy and a look at a few generated words all go through `Runtime`, so that base and
artifact are always run by the same code, in this process or in another interpreter. A speed harness needs less than
that, and sees less: `timed` alone says when each token of a batch was there.

Left out: padding and attention masks (every row of a batch has the same length), sampling, a stop at the end token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

Clock = Callable[[], float]


class DoesNotFit(Exception):
    """A batch for which there is no memory here: recorded, and the run goes on with the next."""


@dataclass(frozen=True)
class Facts:
    """What a loaded model is, as its runtime tells it.

    Attributes:
        weights: how weights are held while they run, for people: "int4 packed (210 layers), bfloat16".
        kernels: how many linear layers each kernel runs, by the kernel's name at one row.
        weight_bytes: of all weights in memory, second copies included.
        read_bytes: of the weights that a decode pass reads: all but an embedding table that is no head.
        peak_bytes: the running process's resident high-water mark so far.
        kv_bytes_per_token: keys and values of one token, all layers.
        multiplied: weights by which a prompt's token is multiplied: those of linear layers but the head; 0: not known.
        versions: of the libraries that computed.
        notes: what a reader of the figures must know.
    """

    weights: str
    weight_bytes: int
    read_bytes: int
    peak_bytes: int
    kv_bytes_per_token: int = 0
    multiplied: int = 0
    kernels: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Runtime(Protocol):
    """Something that runs an artifact. One model at a time; tensors on the host."""

    device: str
    vocab_size: int  # of the loaded model's logits

    def prepare(self, path: Path) -> None:
        """Import what `load` will need, so that `load` takes the model's time and not Python's imports'."""

    def load(self, path: Path, *, threads: int, dtype: str = "bfloat16", expand: bool = False) -> None:
        """Make the checkpoint folder ready to run; `threads` holds for the whole process.

        With `expand` coded weights are decoded once, where they would be at every step: for figures of quality only.
        """

    def prefill(self, tokens_BT: Tensor) -> Tensor:
        """Process prompts into a new cache; the last position's logits `[B, V]`."""

    def decode(self, n: int) -> Tensor:
        """`n` forward passes of one token each, greedily, after `prefill`; the `n` tokens chosen `[B, n]`."""

    def follow(self, rows_R: Tensor | None, tokens_RT: Tensor) -> Tensor:
        """Go on from rows `rows_R` of the cache (None: all), any number of times each; logits `[R, T, V]`."""

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """The logits of every position `[B, T, V]`; touches no cache."""

    def timed(self, tokens_BT: Tensor, n: int, clock: Clock) -> list[float]:
        """Readings of the clock, n + 2: at the start, when the whole batch has its first token, and each of `n` more.

        Raises:
            DoesNotFit: there is no memory for this batch.
        """

    def facts(self) -> Facts:
        """What is loaded."""

    def unload(self) -> None:
        """Give the model's memory back."""
