"""One reduction of gradients in flight, from the packed buffer to the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcompat.core import agreement, in_flight
from hpcompat.core.comm_ctx import NULL_STREAM
from hpcompat_torch import collectives
from hpcompat_torch.streams import current_stream, on_stream

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import ReduceRequest
    from hpcompat_torch.param import ShardedParam


class ReductionInFlight(in_flight.ReductionInFlight["ShardedParam"]):
    def __init__(self, *, input: torch.Tensor | None, output: torch.Tensor, **options: Any) -> None:
        super().__init__(**options)
        self.input = input
        self.output = output
        self.input_event: Any = None

    # Issue

    def issue(self, *, async_op: bool) -> None:
        """Pre-divide, reduce-scatter, all-reduce: all collectives, in the order in which native FSDP2 issues them."""
        request, device = self.request, self.output.device
        streams = request.reduce_stream is not NULL_STREAM
        if streams:
            request.reduce_stream.wait_stream(current_stream(device))
        with on_stream(request.reduce_stream, device):
            assert self.input is not None
            _divide(self.input, request.plan.pre)
            if request.shard_world_size > 1 and self.output.numel() > 0:
                self.work = self._reduce_scatter(async_op=async_op)
            self.input_event = request.reduce_stream.record_event()
            if request.all_reduce_group is not None:
                self._all_reduce(async_op=async_op)

    def _reduce_scatter(self, *, async_op: bool) -> Any:
        request, plan = self.request, self.request.plan
        if not request.takes_part:
            self.output.zero_()
            return None
        op, group = collectives.reduce_op(plan.scatter_op, plan.premul), request.scatter_group
        try:
            if request.comm is None:
                return collectives.reduce_scatter(self.output, self.input, group=group, op=op, async_op=async_op)  # type: ignore[arg-type]
            return request.comm(output_tensor=self.output, input_tensor=self.input, group=group, op=op)
        except RuntimeError as error:
            collectives.explain(error, collective=self._collective, owner=request.owner)
            raise

    def _all_reduce(self, *, async_op: bool) -> None:
        request = self.request
        self._wait_for_work()
        if not request.all_reduce:
            self._keep_partial()
            return
        for param, view in self._pieces():
            if param.partial_grad is not None:
                view += param.partial_grad
                param.partial_grad = None
        self.post_stream = request.all_reduce_stream
        if self.post_stream is not NULL_STREAM:
            self.post_stream.wait_stream(request.reduce_stream)
        with on_stream(self.post_stream, self.output.device):
            op = collectives.reduce_op(request.plan.all_reduce_op)
            if request.takes_part:
                self._collective = "all-reduce"
                try:
                    self.work = dist.all_reduce(self.output, group=request.all_reduce_group, op=op, async_op=async_op)
                except RuntimeError as error:
                    collectives.explain(error, collective=self._collective, owner=request.owner)
                    raise

    def _keep_partial(self) -> None:
        """HSDP without all-reduce: the sum over the shard group waits for a later backward, in the reduce dtype."""
        for param, view in self._pieces():
            if param.partial_grad is None:
                param.partial_grad = view
            else:
                param.partial_grad += view
        self.post_event = self.post_stream.record_event()
        self._is_done = True

    def _pieces(self) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Each parameter's padded piece of the flat output."""
        return list(zip(self.params, self.output.split([param.padded_numel for param in self.params]), strict=True))

    # Complete

    def _finish(self) -> None:
        request, device = self.request, self.output.device
        if request.hook is not None:
            self._move_to_hook_stream(request)
        with on_stream(self.post_stream, device):
            _divide(self.output, request.plan.owed)
            if request.hook is not None:
                request.hook(self.output)
            _divide(self.output, request.plan.post)
            if request.scale is not None:
                self.output.mul_(request.scale)
            self._deliver()
            self.post_event = self.post_stream.record_event()

    def _move_to_hook_stream(self, request: ReduceRequest) -> None:
        if request.all_reduce_stream is not NULL_STREAM and self.post_stream is not request.all_reduce_stream:
            request.all_reduce_stream.wait_stream(self.post_stream)
            self.post_stream = request.all_reduce_stream

    def _deliver(self) -> None:
        first = self.params[0]
        to_main_grad = first.keeps_main_grad
        output = self.output
        if not to_main_grad and output.dtype != self.orig_dtype:
            output = output.to(self.orig_dtype)
        offset = 0
        for param in self.params:
            grad = torch.as_strided(output, param.shard_shape, param.shard_stride, offset)
            offset += param.padded_numel
            if param.offloads:
                grad = param.to_offload(grad, stream=self.post_stream)
            param.deliver(grad, to_main_grad=to_main_grad)

    def release_input(self) -> None:
        if self.input_event is not None:
            current_stream(self.output.device).wait_event(self.input_event)
        self.input = None

    def _wait_for_work(self) -> None:
        if self.work is not None:
            try:
                agreement.wait(self.work)
            except RuntimeError as error:
                collectives.explain(error, collective=self._collective, owner=self.request.owner)
                raise
            self.work = None


def _divide(tensor: torch.Tensor, divisor: float | None) -> None:
    if divisor is not None and divisor != 1:
        tensor.div_(divisor)
