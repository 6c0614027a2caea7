"""What the neutral training loop asks of a framework: the functions that `decoder_<backend>.py` must define.

The module itself is the implementation; there is no class to derive from.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from comparison import Counts, Snapshot
from options import Options


@dataclass(frozen=True)
class World:
    """This process among the ranks of the job; `device` is the framework's own."""

    rank: int
    size: int
    device: Any


class PeakProbe(Protocol):
    """Watches how many bytes of parameters are unsharded at the same time, until closed."""

    peak_bytes: int

    def close(self) -> None: ...


class Framework(Protocol):
    """Models, losses and optimizers are opaque to the loop, but a sharded model has the methods of FSDPModule."""

    def start(self, options: Options) -> World:
        """Pick the device and join the process group, or make one of size 1 when no launcher started this process."""

    def finish(self, exit_code: int) -> NoReturn:
        """Wait for all ranks, leave the process group, and end this process."""

    def build_model(self, options: Options) -> Any:
        """The whole decoder; its weights depend on the options alone, so every call on every rank gives the same."""

    def shard_model(self, model: Any, *, options: Options, world: World, implementation: str) -> None:
        """Apply `fully_shard` of "hpcompat" or of the "native" library to the model, in place."""

    def make_optimizer(self, model: Any, *, options: Options) -> Any:
        """AdamW over the sharded parameters."""

    def compute_loss(self, model: Any, batch: NDArray[np.int64], *, world: World) -> Any:
        """Mean next-byte cross-entropy of a batch of shape (batch, seq_len + 1), computed in fp32."""

    def backward(self, loss: Any, *, num_microbatches: int) -> float:
        """Add this microbatch's part of the gradient; give back the loss as it was before the division."""

    def zero_gradients(self, optimizer: Any) -> None: ...

    def clip_gradients(self, model: Any, *, max_norm: float) -> None:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`."""

    def optimizer_step(self, optimizer: Any) -> None: ...

    def mean_over_ranks(self, value: float, *, world: World) -> float: ...

    def sum_over_ranks(self, counts: Counts, *, world: World) -> Counts: ...

    def sharded_bytes(self, model: Any) -> int:
        """Bytes of this rank's shards of all parameters."""

    def watch_unsharded_bytes(self, model: Any) -> PeakProbe: ...

    def snapshot(self, model: Any, optimizer: Any) -> Snapshot: ...


def load_framework(backend: str) -> Framework:
    return cast(Framework, importlib.import_module(f"decoder_{backend}"))
