"""Communication objects: how a param group allocates its buffers and calls its collectives (COM-01, COM-02)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, runtime_checkable


class ReduceOp(Enum):
    """Reductions that a process group may have. ``PREMUL_SUM`` multiplies by a number, then sums."""

    SUM = "sum"
    AVG = "avg"
    PREMUL_SUM = "premul_sum"


@runtime_checkable
class Comm(Protocol):
    """What gathers and reductions share: where their buffers come from."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """A flat buffer; ``size`` is a 1-tuple, the number of elements."""
        ...


@runtime_checkable
class AllGather(Comm, Protocol):
    """A custom all-gather, installed by ``HSDPModule.set_custom_all_gather``."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather ``input_tensor`` (a view of this rank's slot of ``output_tensor``) over ``group``.

        Returns a work object with ``wait()`` if ``async_op`` (only for ``unshard(async_op=True)``), else ``None``.
        """
        ...


@runtime_checkable
class ReduceScatter(Comm, Protocol):
    """A custom reduce-scatter, installed by ``HSDPModule.set_custom_reduce_scatter``."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce ``input_tensor`` with ``op`` (the framework's own reduction object) and keep this rank's part."""
        ...
