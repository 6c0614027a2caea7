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
from hpcompat.core import failure
from hpcompat.errors import CapabilityError
from hpcompat_mindspore.communicator import Communicator, Work
from hpcompat_mindspore.tensors import HOST, Buffer, Memory, memory_of

if TYPE_CHECKING:
    from hpcompat.backend import GatherRequest, ReduceRequest
    from hpcompat.core.param_group import ParamGroup
    from hpcompat_mindspore.gradients import GradientBucket


def all_gather(output: Buffer, input: Buffer, *, group: Communicator) -> Work:
    return group.all_gather(output, input)


def reduce_scatter(output: Buffer, input: Buffer, *, group: Communicator, op: ReduceOp) -> Work:
    return group.reduce_scatter(output, input, op)


def all_reduce(buffer: Buffer, *, group: Communicator, op: ReduceOp) -> Work:
    """In place."""
    return group.all_reduce(buffer, op)


def explain(error: RuntimeError, *, collective: str, owner: ParamGroup | None) -> None:
    """Raise an error that says more, unless ``error`` is of a kind that no transport raises (a custom collective's).

    Raises:
        CollectiveError: naming the collective and the unit.
    """
    if type(error) is RuntimeError or type(error).__module__.startswith("mpi4py."):
        raise failure.failed(error, collective=collective, owner=owner) from error


class GatherInFlight:
    """An all-gather and its flat output, ``[world size, elements per rank]``; ``output`` is ``None`` where nothing
    travels.
    """

    __slots__ = ("_memory", "_owner", "_tensor", "event", "is_async", "output", "source", "work", "world_size")

    def __init__(
        self,
        output: Buffer | None,
        *,
        source: Any,
        world_size: int,
        work: Any = None,
        tensor: Tensor | None = None,
        memory: Memory | None = None,
        owner: ParamGroup | None = None,
    ) -> None:
        self.output = output
        self.source = source
        self.world_size = world_size
        self.work = work
        self.event = None
        self.is_async = work is not None
        self._owner = owner
        # The output of a custom collective, which may fill it by operations that are still queued.
        self._tensor, self._memory = tensor, memory

    def wait(self) -> None:
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                explain(error, collective="all-gather", owner=self._owner)
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


class ReductionInFlight:
    """A reduction whose collective has been issued; holds everything needed to finish it."""

    def __init__(
        self, bucket: GradientBucket, flat: Buffer, *, request: ReduceRequest, memory: Memory, device: str
    ) -> None:
        self.params = bucket.params
        self.request = request
        self.post_stream = request.reduce_stream
        self.post_event: Any = None
        self._dtype, self._orig_dtype = bucket.reduce_dtype, bucket.orig_dtype
        self._memory, self._device = memory, device
        self._input: Buffer | None = flat
        self._output: Buffer = flat  # unless there are other shards to scatter to
        self._work: Any = None
        self._collective = "reduce-scatter"
        self._is_done = False

    # Issue

    def issue(self) -> None:
        """Pre-divide, reduce-scatter, all-reduce: all collectives, in the order in which native FSDP2 issues them."""
        request = self.request
        self._input = self._output = self._divide(self._output, request.plan.pre)
        if request.shard_world_size > 1 and self._output.size > 0:
            self._reduce_scatter()
        if request.all_reduce_group is not None:
            self._wait()
            self._all_reduce() if request.all_reduce else self._keep_partial()

    def _reduce_scatter(self) -> None:
        request, memory = self.request, self._memory
        numel = self._output.size // request.shard_world_size
        if not request.takes_part:
            self._output = memory.zeros((numel,), self._dtype)
            return
        if request.comm is None:
            self._output = memory.empty(numel, self._dtype)
            self._work = reduce_scatter(
                self._output, self._input, group=request.scatter_group, op=request.plan.scatter_op
            )
            return
        output = request.comm.allocate((numel,), dtype=self._dtype, device=self._device)
        input = memory.tensor(self._input, (self._input.size,))  # type: ignore[union-attr]
        try:
            work = request.comm(
                output_tensor=output, input_tensor=input, group=request.scatter_group, op=request.plan.scatter_op
            )
            if hasattr(work, "wait"):
                work.wait()
        except RuntimeError as error:
            explain(error, collective=self._collective, owner=request.owner)
            raise
        self._output = memory.read(output)

    def _all_reduce(self) -> None:
        for param, start in self._pieces():
            if param.partial_grad is not None:
                self._output = self._memory.add_at(self._output, start, param.partial_grad)
                param.partial_grad = None
        request = self.request
        if request.takes_part:
            self._collective = "all-reduce"
            self._work = all_reduce(self._output, group=request.all_reduce_group, op=request.plan.all_reduce_op)

    def _keep_partial(self) -> None:
        """HSDP without all-reduce: the sum over the shard group waits for a later backward, in the reduce dtype."""
        for param, start in self._pieces():
            piece = self._output[start : start + param.padded_numel]
            kept = param.partial_grad
            param.partial_grad = piece if kept is None else self._memory.add(kept, piece)
        self._is_done = True

    def _pieces(self) -> list[tuple[Any, int]]:
        """Each parameter and where its padded piece of the output starts."""
        pieces, start = [], 0
        for param in self.params:
            pieces.append((param, start))
            start += param.padded_numel
        return pieces

    # Complete

    def complete(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._wait()
        request, memory = self.request, self._memory
        if request.pledge is not None:
            request.pledge.settle()
        output = self._output
        if request.hook is not None:
            output = self._call_hook(request.hook, output)
        output = self._divide(output, request.plan.post)
        if request.scale is not None:
            output = memory.multiply(output, request.scale)
        if not self.params[0].keeps_main_grad and self._dtype != self._orig_dtype:
            output = memory.cast(output, self._orig_dtype)
        for param, start in self._pieces():
            param.deliver(output[start : start + param.padded_numel])

    def _call_hook(self, hook: Any, output: Buffer) -> Buffer:
        """The hook changes the tensor in place or, as few operators do that on the CPU, returns another one."""
        tensor = self._memory.tensor(output, (output.size,))
        changed = hook(tensor)
        return self._memory.read(changed if isinstance(changed, Tensor) else tensor).reshape(-1)

    def _divide(self, buffer: Buffer, divisor: float | None) -> Buffer:
        return buffer if divisor is None or divisor == 1 else self._memory.divide(buffer, divisor)

    def release_input(self) -> None:
        self._input = None

    def abandon(self) -> None:
        self._is_done = True
        self._wait()
        self.release_input()

    def _wait(self) -> None:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                explain(error, collective=self._collective, owner=self.request.owner)
                raise
            self._work = None


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
