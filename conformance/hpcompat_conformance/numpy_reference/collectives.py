"""Gathers and reductions of flat buffers: issued and completed here, when the scheduler says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcompat.comm import ReduceOp
from hpcompat.core import agreement, in_flight
from hpcompat_conformance.numpy_reference.world import Array, Call, Group, Work

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import GatherRequest, ReduceRequest, Streams
    from hpcompat_conformance.numpy_reference.param import ShardedParam


@dataclass(frozen=True)
class Reduce:
    """A reduction with its argument: what ``ReduceScatter`` objects get as ``op``."""

    op: ReduceOp
    premul: float | None = None

    def __call__(self, inputs: Sequence[Array]) -> Array:
        if self.op is ReduceOp.PREMUL_SUM:
            assert self.premul is not None
            inputs = [array * array.dtype.type(self.premul) for array in inputs]
        total: Array = functools.reduce(np.add, inputs)
        return total / total.dtype.type(len(inputs)) if self.op is ReduceOp.AVG else total


def describe(name: str, data: Array, group: Group, op: Reduce | None = None) -> Call:
    return Call(name, group.size, data.size, data.dtype.name, op.op.value if op else None)


class Buffers:
    """Where collectives get their memory. Fresh memory is not zero: whoever reads before waiting shall see it."""

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Array:
        return np.full(size, np.nan, dtype)


class AllGather(Buffers):
    """The default :class:`hpcompat.comm.AllGather`."""

    def __call__(self, output_tensor: Array, input_tensor: Array, group: Group, async_op: bool = False) -> Work | None:
        call = describe("all_gather", input_tensor, group)
        return _begin(group.issue(call, input_tensor, output=output_tensor, combine=np.concatenate), async_op)


class ReduceScatter(Buffers):
    """The default :class:`hpcompat.comm.ReduceScatter`."""

    def __call__(
        self, output_tensor: Array, input_tensor: Array, group: Group, op: Reduce, async_op: bool = False
    ) -> Work | None:
        def combine(inputs: list[Array]) -> Array:
            return op([array.reshape(group.size, -1)[group.index] for array in inputs])

        call = describe("reduce_scatter", input_tensor, group, op)
        return _begin(group.issue(call, input_tensor, output=output_tensor, combine=combine), async_op)


def all_reduce(buffer: Array, group: Group, op: Reduce) -> Work:
    """In place."""
    return group.issue(describe("all_reduce", buffer, group, op), buffer, output=buffer, combine=op)


def _begin(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


class GatherInFlight:
    """Implements :class:`hpcompat.contract.scheduler.Gather`; ``output`` is ``[ranks, elements per rank]``."""

    def __init__(self, shard: Array, *, request: GatherRequest, streams: Streams) -> None:
        self.source = request.source
        self._streams = streams
        self._work: Work | None = None
        self.output = shard.reshape(1, -1) if request.world_size == 1 else self._issue(shard, request)
        self.is_async = self._work is not None
        self.event = request.gather_stream.record_event()

    def _issue(self, shard: Array, request: GatherRequest) -> Array:
        comm = request.comm or AllGather()
        flat = comm.allocate((shard.size * request.world_size,), dtype=shard.dtype, device="numpy")
        rows = flat.reshape(request.world_size, shard.size)
        rows[request.group.index] = shard
        request.gather_stream.wait_stream(request.copy_in_stream)
        if request.takes_part:
            self._work = comm(
                output_tensor=flat,
                input_tensor=rows[request.group.index],
                group=request.group,
                async_op=request.async_op,
            )
        else:
            flat[...] = 0
        return rows

    def wait(self) -> None:
        self._streams.current().wait_event(self.event)
        if self._work is not None:
            self._work.wait()


class ReductionInFlight(in_flight.ReductionInFlight["ShardedParam"]):
    """Implements :class:`hpcompat.contract.scheduler.Reduction`. All that it needs to finish came with its request."""

    def __init__(
        self, params: Sequence[ShardedParam], flat: Array, *, orig_dtype: Any, request: ReduceRequest, streams: Streams
    ) -> None:
        super().__init__(params=params, request=request, orig_dtype=orig_dtype)
        self._streams = streams
        self._input: Array | None = flat
        self._output = flat  # unless there are other shards to scatter to
        self._issue(flat)

    def _issue(self, flat: Array) -> None:
        request = self.request
        request.reduce_stream.wait_stream(self._streams.current())
        _divide(flat, request.plan.pre)
        if request.shard_world_size > 1:
            self._reduce_scatter(flat)
        self._input_event = request.reduce_stream.record_event()
        if request.all_reduce_group is not None:
            self._all_reduce() if request.all_reduce else self._keep_partial()

    def _reduce_scatter(self, flat: Array) -> None:
        request = self.request
        comm = request.comm or ReduceScatter()
        self._output = comm.allocate((flat.size // request.shard_world_size,), dtype=flat.dtype, device="numpy")
        if not request.takes_part:
            self._output[...] = 0
            return
        call = functools.partial(comm, async_op=True) if request.comm is None else comm
        op = Reduce(request.plan.scatter_op, request.plan.premul)
        self.work = call(output_tensor=self._output, input_tensor=flat, group=request.scatter_group, op=op)

    def _all_reduce(self) -> None:
        self._wait_for_work()
        for param, piece in self._pieces():
            piece += 0 if param.partial_grad is None else param.partial_grad
            param.partial_grad = None
        self._move_to(self.request.all_reduce_stream)
        if self.request.takes_part:
            op = Reduce(self.request.plan.all_reduce_op)
            self.work = all_reduce(self._output, self.request.all_reduce_group, op)

    def _keep_partial(self) -> None:
        """HSDP without all-reduce: the sum over the shards waits for a later backward to take it along."""
        self._wait_for_work()
        for param, piece in self._pieces():
            param.partial_grad = piece if param.partial_grad is None else param.partial_grad + piece
        self.post_event = self.post_stream.record_event()
        self._is_done = True

    def _finish(self) -> None:
        _divide(self._output, self.request.plan.owed)
        if self.request.hook is not None:
            self._move_to(self.request.all_reduce_stream)
            self.request.hook(self._output)
        _divide(self._output, self.request.plan.post)
        if self.request.scale is not None:
            self._output *= self._output.dtype.type(self.request.scale)
        for param, piece in self._pieces():
            param.deliver(piece, orig_dtype=self.orig_dtype)
        self.post_event = self.post_stream.record_event()

    def release_input(self) -> None:
        self._streams.current().wait_event(self._input_event)
        self._input = None

    def _wait_for_work(self) -> None:
        if self.work is not None:
            agreement.wait(self.work)

    def _move_to(self, stream: Any) -> None:
        if stream is not self.post_stream:
            stream.wait_stream(self.post_stream)
            self.post_stream = stream

    def _pieces(self) -> list[tuple[ShardedParam, Array]]:
        """The output, cut by parameter."""
        ends = np.cumsum([param.layout.padded_numel for param in self.params])
        return list(zip(self.params, np.split(self._output, ends[:-1]), strict=True))


def _divide(buffer: Array, divisor: float | None) -> None:
    if divisor is not None:
        buffer /= buffer.dtype.type(divisor)
