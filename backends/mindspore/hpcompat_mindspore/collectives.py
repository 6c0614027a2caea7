"""Gathers and reductions of flat buffers, issued and completed when the scheduler says so.

All collectives go through the three functions below, looked up in this module at call time, so that whoever wants to
record them can wrap those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.core import failure, in_flight
from hpcompat.errors import CapabilityError
from hpcompat_mindspore.communicator import Communicator, Work
from hpcompat_mindspore.tensors import HOST, Buffer, Memory, memory_of

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import GatherRequest, HookedGroup


def all_gather(output: Buffer, input: Buffer, *, group: Communicator) -> Work:
    return group.all_gather(output, input)


def reduce_scatter(output: Buffer, input: Buffer, *, group: Communicator, op: ReduceOp) -> Work:
    return group.reduce_scatter(output, input, op)


def all_reduce(buffer: Buffer, *, group: Communicator, op: ReduceOp) -> Work:
    """In place."""
    return group.all_reduce(buffer, op)


def explain(error: RuntimeError, *, collective: str, owner: HookedGroup | None) -> None:
    """Raise an error that says more, unless ``error`` is of a kind that no transport raises (a custom collective's).

    Raises:
        CollectiveError: naming the collective and the unit.
    """
    if type(error) is RuntimeError or type(error).__module__.startswith("mpi4py."):
        raise failure.failed(error, collective=collective, owner=owner) from error


class GatherInFlight(in_flight.GatherInFlight):
    __slots__ = ("_memory", "_tensor")

    def __init__(
        self, output: Buffer | None, *, tensor: Tensor | None = None, memory: Memory | None = None, **options: Any
    ) -> None:
        super().__init__(output, **options)
        # The output of a custom collective, which may fill it by operations that are still queued.
        self._tensor, self._memory = tensor, memory

    def wait(self) -> None:
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                explain(error, collective="all-gather", owner=self.owner)
                raise
            self.work = None
        if self._tensor is not None:
            assert self._memory is not None
            self.output = self._memory.read(self._tensor)
            self._tensor = None


def call_gather(output: Tensor, input: Tensor, *, request: GatherRequest) -> Any:
    """The custom all-gather; its work object, if it has one."""
    assert request.comm is not None
    try:
        return request.comm(output_tensor=output, input_tensor=input, group=request.group, async_op=request.async_op)
    except RuntimeError as error:
        explain(error, collective="all-gather", owner=request.owner)
        raise


class ProcessGroupComm:
    """The default collectives as communication objects, on ordinary memory."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        memory = memory_of(device)
        return memory.tensor(memory.empty(size[0], dtype), (size[0],))


class ProcessGroupAllGather(ProcessGroupComm):
    """The default :class:`hpcompat.comm.AllGather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Communicator, async_op: bool = False
    ) -> Work | None:
        memory = _memory()
        work = all_gather(memory.read(output_tensor), memory.read(input_tensor), group=group)
        return _begin(work, async_op)


class ProcessGroupReduceScatter(ProcessGroupComm):
    """The default :class:`hpcompat.comm.ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Communicator, op: ReduceOp, async_op: bool = False
    ) -> Work | None:
        memory = _memory()
        work = reduce_scatter(memory.read(output_tensor), memory.read(input_tensor), group=group, op=op)
        return _begin(work, async_op)


def _begin(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _memory() -> Memory:
    return HOST if mindspore.get_context("device_target") == "CPU" else memory_of("Ascend")


def comm_for(kind: str, group: Communicator) -> tuple[AllGather, ReduceScatter]:
    if kind == "symm_mem":
        raise CapabilityError(
            backend="mindspore", capability="symmetric memory", hint="MindSpore has no such memory; drop the call"
        )
    return ProcessGroupAllGather(), ProcessGroupReduceScatter()
