"""One reduction of gradients in flight, from the packed buffer to the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import Tensor

from hpcompat.core import in_flight
from hpcompat_mindspore import collectives

if TYPE_CHECKING:
    from hpcompat_mindspore.param import ShardedParam
    from hpcompat_mindspore.tensors import Buffer, Memory


class ReductionInFlight(in_flight.ReductionInFlight["ShardedParam"]):
    def __init__(self, *, reduce_dtype: Any, flat: Buffer, memory: Memory, device: str, **options: Any) -> None:
        super().__init__(**options)
        self._dtype = reduce_dtype
        self._memory, self._device = memory, device
        self._input: Buffer | None = flat
        self._output: Buffer = flat  # unless there are other shards to scatter to

    # Issue

    def issue(self) -> None:
        """Pre-divide, reduce-scatter, all-reduce: all collectives, in the order in which native FSDP2 issues them."""
        request = self.request
        self._input = self._output = self._divide(self._output, request.plan.pre)
        if request.shard_world_size > 1 and self._output.size > 0:
            self._reduce_scatter()
        if request.all_reduce_group is not None:
            self._wait_for_work()
            self._all_reduce() if request.all_reduce else self._keep_partial()

    def _reduce_scatter(self) -> None:
        request, memory = self.request, self._memory
        numel = self._output.size // request.shard_world_size
        if not request.takes_part:
            self._output = memory.zeros((numel,), self._dtype)
            return
        if request.comm is None:
            self._output = memory.empty(numel, self._dtype)
            self.work = collectives.reduce_scatter(
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
            collectives.explain(error, collective=self._collective, owner=request.owner)
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
            self.work = collectives.all_reduce(
                self._output, group=request.all_reduce_group, op=request.plan.all_reduce_op
            )

    def _keep_partial(self) -> None:
        """HSDP without all-reduce: the sum over the shard group waits for a later backward, in the reduce dtype."""
        for param, start in self._pieces():
            piece = self._output[start : start + param.padded_numel]
            kept = param.partial_grad
            param.partial_grad = piece if kept is None else self._memory.add(kept, piece)
        self._is_done = True

    def _pieces(self) -> list[tuple[ShardedParam, int]]:
        """Each parameter and where its padded piece of the output starts."""
        pieces, start = [], 0
        for param in self.params:
            pieces.append((param, start))
            start += param.padded_numel
        return pieces

    # Complete

    def _finish(self) -> None:
        request, memory = self.request, self._memory
        output = self._divide(self._output, request.plan.owed)
        if request.hook is not None:
            output = self._call_hook(request.hook, output)
        output = self._divide(output, request.plan.post)
        if request.scale is not None:
            output = memory.multiply(output, request.scale)
        if not self.params[0].keeps_main_grad and self._dtype != self.orig_dtype:
            output = memory.cast(output, self.orig_dtype)
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

    def _wait_for_work(self) -> None:
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                collectives.explain(error, collective=self._collective, owner=self.request.owner)
                raise
            self.work = None
