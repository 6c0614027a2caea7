"""The tensors of one param group: the flat shard, the whole parameters, and the way between the two.

[Note: layout]
On the CPU the shards lie one after another in one flat buffer (padded, see ``hpcompat.core.layout``), and the
parameters show parts of it: a gather needs no copy-in, and an optimizer's step in place is seen at once. A parameter
whose data was set from outside is found by its address and copied back in. The gathered buffer is ``[world size,
elements per rank]``; its columns, rank after rank, are the whole parameters, except that for ``Shard(dim > 0)`` the
pieces are interleaved. Where parameters of several dtypes travel together, everything travels as bytes.

[Note: queued operations]
MindSpore queues the operations of a backward and looks at the parameters' data when it runs them. So what a parameter
shows may change only when the queue is empty: without that, gradients were wrong, silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from hpcompat.contract.states import ShardedState, TrainingState
from hpcompat.errors import CapabilityError
from hpcompat_mindspore import autograd, collectives, gradients
from hpcompat_mindspore.autograd import executor
from hpcompat_mindspore.collectives import GatherInFlight
from hpcompat_mindspore.mpi import progress
from hpcompat_mindspore.param import ShardedParam, Shown, places_of
from hpcompat_mindspore.reduction import ReductionInFlight
from hpcompat_mindspore.tensors import Buffer, is_floating, memory_of, numpy_dtype

if TYPE_CHECKING:
    from hpcompat.contract.backend import WrapSpec
    from hpcompat.contract.scheduler import GatherRequest, ReduceRequest
    from hpcompat.core.gradients import GradientBucket
    from hpcompat.mesh import FSDPMeshInfo


class GroupTensors(gradients.GroupGradients):
    """Implements :class:`hpcompat.contract.scheduler.GroupTensors` for MindSpore."""

    def __init__(self, spec: WrapSpec) -> None:
        self._spec = spec
        self._device: str = spec.device
        self._memory = memory_of(spec.device)
        places = places_of(spec.parameters, spec.modules)
        self.params = [
            ShardedParam(
                parameter,
                places=places[parameter],
                mesh_info=spec.mesh_info,
                placement=placement,
                memory=self._memory,
            )
            for parameter, placement in zip(spec.parameters, spec.placements, strict=True)
        ]
        self.names = [param.name for param in self.params]
        self._rank = self.params[0].rank
        self._travels_as_bytes = False
        self._gather_dtype: Any = None
        # The flat shard when every parameter's data lies in it, else None.
        self._flat: Buffer | None = None

    # Shards

    def shard(self) -> None:
        for param in self.params:
            param.take_over()
            param.keeps_main_grad = bool(getattr(self._spec.mp_policy, "apply_grad_on_fp32_main_grad", False))
        if any(param.is_meta for param in self.params):
            for param in self.params:
                with mindspore.DeviceCtx("meta"):
                    shard = mindspore.mint.empty(param.shard_shape, dtype=param.orig_dtype)
                param.adopt_meta_shard(shard)
        else:
            self._lay_out([param.cut(self._memory.read(param.parameter)) for param in self.params])
        self._fix_dtypes()

    def _lay_out(self, shards: Sequence[Buffer]) -> None:
        """Copy ``shards`` into fresh padded memory: one flat buffer if they can share one, else one buffer each."""
        sizes = [param.padded_numel for param in self.params]
        for param in self.params:
            param.orig_dtype = param.parameter.dtype
        dtypes = {param.orig_dtype for param in self.params}
        padded = [self._memory.pad(shard.reshape(-1), size) for shard, size in zip(shards, sizes, strict=True)]
        if self._spec.zero_copy and len(dtypes) == 1 and self._device == "CPU":
            self._flat = self._memory.pack([piece.reshape(1, -1) for piece in padded], dtypes.pop())
            ends = np.cumsum(sizes)
            pieces = [self._flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        else:
            self._flat = None
            pieces = [
                self._memory.pack([piece.reshape(1, -1)], param.orig_dtype)
                for param, piece in zip(self.params, padded, strict=True)
            ]
        for param, piece in zip(self.params, pieces, strict=True):
            param.adopt_shard(piece)

    def bind_names(self, prefixes: dict[Any, str]) -> None:
        for param in self.params:
            module, attribute = param.places[0]
            param.name = prefixes.get(module, "") + attribute
        self.names = [param.name for param in self.params]

    def rebind(self) -> None:
        """Take up parameters whose data was cast, materialized, loaded or set since it was last taken up."""
        for param in self.params:
            param.check_places()
        if not any(param.shown is Shown.SHARD and param.is_elsewhere for param in self.params):
            return
        if any(param.is_meta for param in self.params):
            return
        self._lay_out([param.current_shard() for param in self.params])
        self._fix_dtypes()

    def prepare(self) -> None:
        on_meta = [param.name for param in self.params if param.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {on_meta}. Expected values for them, but got none: call module.to_empty(device=...) "
                "and initialize them, or load a state dict"
            )
        self.rebind()
        self._fix_dtypes()

    def _fix_dtypes(self) -> None:
        policy = self._spec.mp_policy
        same = policy.reduce_dtype is not None and policy.reduce_dtype == policy.param_dtype
        for param in self.params:
            follows = policy.param_dtype is not None and is_floating(param.orig_dtype)
            param.param_dtype = policy.param_dtype if follows else param.orig_dtype
            param.reduce_dtype = None if same else policy.reduce_dtype
        dtypes = {param.param_dtype for param in self.params}
        self._travels_as_bytes = len(dtypes) > 1
        self._gather_dtype = mindspore.uint8 if self._travels_as_bytes else dtypes.pop()
        if self._travels_as_bytes and self._device != "CPU":
            raise CapabilityError(
                backend="mindspore",
                capability="parameters of several dtypes in one collective",
                hint=f"only on the CPU, but got {sorted(map(str, dtypes))}; pass mp_policy.param_dtype",
            )

    # Gather

    @property
    def unsharded_bytes(self) -> int:
        return sum(prod(param.layout.shape) * numpy_dtype(param.param_dtype).itemsize for param in self.params)

    def all_gather(self, request: GatherRequest) -> GatherInFlight:
        source, world_size = request.source, request.world_size
        if source is ShardedState.SHARDED:
            self.rebind()
        if world_size == 1:
            return GatherInFlight(None, source=source, world_size=1)
        if not request.takes_part:
            numel = self._copy_in(source).size * world_size
            return GatherInFlight(
                self._memory.zeros((numel,), self._gather_dtype), source=source, world_size=world_size
            )
        if request.comm is not None:
            return self._gather_with(request.comm, request)
        input = self._copy_in(source)
        output = self._memory.empty(input.size * world_size, self._gather_dtype)
        work = collectives.all_gather(output, input, group=request.group)
        gather = GatherInFlight(output, source=source, world_size=world_size, work=work, owner=request.owner)
        if not request.async_op:
            gather.wait()
            gather.is_async = False
        return gather

    def _gather_with(self, comm: Any, request: GatherRequest) -> GatherInFlight:
        """A custom all-gather: its input is this rank's slot of the output that it allocated."""
        numel = self._copy_in(request.source).size
        tensor = comm.allocate((numel * request.world_size,), dtype=self._gather_dtype, device=self._device)
        output = self._memory.read(tensor)
        rank = self._rank if request.source is ShardedState.SHARDED else request.group.rank()
        slot = output[numel * rank : numel * (rank + 1)]
        input = self._copy_in(request.source, out=slot)
        work = collectives.call_gather(tensor, self._memory.tensor(input, (numel,)), request=request)
        return GatherInFlight(
            output,
            source=request.source,
            world_size=request.world_size,
            work=work if hasattr(work, "wait") else None,
            tensor=tensor,
            memory=self._memory,
            owner=request.owner,
        )

    def _copy_in(self, source: ShardedState, *, out: Buffer | None = None) -> Buffer:
        """The gather's input. Without a cast that is the flat shard itself."""
        if source is not ShardedState.SHARDED:
            pieces = [param.slice_data for param in self.params]
        elif self._flat is not None:
            if out is None and self._gather_dtype == self.params[0].orig_dtype:
                return self._flat
            pieces = [self._flat]
        else:
            pieces = [param.padded_shard() for param in self.params]
        if self._travels_as_bytes:
            pieces = [
                self._memory.cast(piece, param.param_dtype).view(np.uint8)
                for param, piece in zip(self.params, pieces, strict=True)
            ]
        return self._memory.pack([piece.reshape(1, -1) for piece in pieces], self._gather_dtype, out=out)

    def copy_out(self, gather: GatherInFlight) -> None:
        gather.wait()
        source, world_size = gather.source, gather.world_size
        if gather.output is None:
            for param in self.params:
                shard = param.padded_shard() if self._flat is None else param.shard_data
                param.whole_data = self._memory.pack([shard.reshape(1, -1)], param.param_dtype)
            return
        sizes = [self._piece_numel(param, source, world_size) for param in self.params]
        if self._travels_as_bytes:
            items = [numpy_dtype(param.param_dtype) for param in self.params]
            sizes = [size * item.itemsize for size, item in zip(sizes, items, strict=True)]
        columns = self._memory.unpack(gather.output, world_size, sizes)
        if self._travels_as_bytes:
            columns = [column.view(item) for column, item in zip(columns, items, strict=True)]
        for param, column in zip(self.params, columns, strict=True):
            param.whole_data = param.join(column) if source is ShardedState.SHARDED else column

    def _piece_numel(self, param: ShardedParam, source: ShardedState, world_size: int) -> int:
        return param.padded_numel if source is ShardedState.SHARDED else param.slice_numel(world_size)

    # Registration

    def to_unsharded(self) -> None:
        _empty_queue()
        for param in self.params:
            param.show_whole()
            gradients.install_capture(param)
        self._forget_shapes()

    def to_sharded(self) -> None:
        _empty_queue()
        for param in self.params:
            param.show_shard()
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        """Where the caller may go on with the parameters at once; forward and backward do it for all units together.

        On Ascend the gather itself has run operators on the shards.
        """
        owner = self.params[0].owner
        if owner is not None and (owner.training_state is TrainingState.IDLE or self._device != "CPU"):
            autograd.forget_shapes()

    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None:
        _empty_queue()
        world_size, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        for param in self.params:
            size = param.slice_numel(world_size)
            kept = param.whole_data[rank * size : (rank + 1) * size]
            data = self._memory.pack([self._memory.pad(kept, size).reshape(1, -1)], param.param_dtype)
            param.show_slice(data, rank=rank, world_size=world_size)

    # Gradients

    def start_reduce(self, bucket: GradientBucket[ShardedParam], request: ReduceRequest) -> ReductionInFlight:
        return gradients.start_reduce(bucket, request, memory=self._memory, device=self._device)

    def wait_for_offload(self) -> None:
        """Nothing is offloaded: on the CPU everything is there already."""


def _empty_queue() -> None:
    """[Note: queued operations]"""
    progress()
    executor.sync()
