"""The tensors of one param group: the seam between scheduler and framework, as short as it can be."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcompat.contract.states import ShardedState
from hpcompat.core.gradients import GroupGradients
from hpcompat_conformance.numpy_reference.collectives import GatherInFlight, ReductionInFlight
from hpcompat_conformance.numpy_reference.param import ShardedParam
from hpcompat_conformance.numpy_reference.world import Array

if TYPE_CHECKING:
    from hpcompat.contract.backend import WrapSpec
    from hpcompat.contract.scheduler import GatherRequest, ReduceRequest, Streams
    from hpcompat.core.gradients import GradientBucket
    from hpcompat.mesh import FSDPMeshInfo


class GroupTensors(GroupGradients["ShardedParam"]):
    """Implements :class:`hpcompat.contract.scheduler.GroupTensors`. Every method is what the protocol says about it."""

    wide_dtypes = (np.float32,)  # numpy has no bfloat16

    def __init__(self, spec: WrapSpec, *, streams: Streams) -> None:
        self._streams = streams
        self.params = [
            ShardedParam(
                parameter, modules=spec.modules, mesh_info=spec.mesh_info, placement=placement, policy=spec.mp_policy
            )
            for parameter, placement in zip(spec.parameters, spec.placements, strict=True)
        ]

    def shard(self) -> None:
        for param in self.params:
            param.register(param.sharded)

    @property
    def names(self) -> list[str]:
        return [param.name for param in self.params]

    def bind_names(self, prefixes: dict[Any, str]) -> None:
        for param in self.params:
            module, attribute = param.places[0]
            param.name = prefixes[module] + attribute

    def prepare(self) -> None:
        for param in self.params:
            module, attribute = param.places[0]
            param.sharded = getattr(module, attribute)
            param.register(param.sharded)

    # Parameters

    @property
    def unsharded_bytes(self) -> int:
        return sum(prod(param.layout.shape) * int(param.param_dtype.itemsize) for param in self.params)

    def all_gather(self, request: GatherRequest) -> GatherInFlight:
        shard = np.concatenate([self._sent(param, request.source) for param in self.params])
        return GatherInFlight(shard, request=request, streams=self._streams)

    def _sent(self, param: ShardedParam, source: ShardedState) -> Array:
        """What this rank brings of ``param``, flat, in the dtype in which it is computed with."""
        if source is ShardedState.SHARDED:
            return param.pad(param.sharded.data).astype(param.param_dtype)
        assert param.post_forward is not None
        return param.post_forward.data

    def copy_out(self, gather: GatherInFlight) -> None:
        gather.wait()
        from_shards = gather.source is ShardedState.SHARDED
        world_size = len(gather.output)
        sizes = [param.layout.padded_numel if from_shards else param.slice_numel(world_size) for param in self.params]
        columns = np.split(gather.output, np.cumsum(sizes)[:-1], axis=1)
        for param, rows in zip(self.params, columns, strict=True):
            param.fill(param.join(rows) if from_shards else param.join_slices(rows))

    def to_unsharded(self) -> None:
        for param in self.params:
            assert param.unsharded is not None
            param.unsharded.requires_grad = param.sharded.requires_grad
            param.post_forward = None
            param.register(param.unsharded)

    def to_sharded(self) -> None:
        for param in self.params:
            param.post_forward = None
            param.register(param.sharded)
            param.free()

    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None:
        for param in self.params:
            param.keep_slice(mesh_info.shard_mesh_rank, mesh_info.shard_mesh_size)
            assert param.post_forward is not None
            param.register(param.post_forward)
            param.free()

    # Gradients

    def has_new_gradients(self) -> bool:
        return any(param.has_new_gradient for param in self.params)

    def watch_gradients(self, note: Callable[[], None]) -> None:
        for param in self.params:
            if param.unsharded is not None and note not in param.unsharded.hooks:
                param.unsharded.hooks.append(note)

    def accumulate_gradients(self) -> None:
        for param in self.params:
            if param.accumulated_grad is not None:
                new = param.take_new_gradient()
                param.accumulated_grad += 0 if new is None else new

    def stash_gradients(self) -> None:
        for param in self.params:
            dtype = param.reduce_dtype
            if dtype is not None and param.accumulated_grad is None:
                new = param.take_new_gradient()
                param.accumulated_grad = None if new is None else new.astype(dtype)

    def start_reduce(self, bucket: GradientBucket[ShardedParam], request: ReduceRequest) -> ReductionInFlight:
        """Rank after rank, its padded chunk of every gradient."""
        pairs = list(zip(bucket.params, bucket.grads, strict=True))
        chunks = [param.pad(param.cut(grad, rank)) for rank in range(request.shard_world_size) for param, grad in pairs]
        flat = np.concatenate(chunks).astype(bucket.reduce_dtype)
        return ReductionInFlight(
            bucket.params, flat, orig_dtype=bucket.orig_dtype, request=request, streams=self._streams
        )

    def wait_for_offload(self) -> None:
        """Everything is in host memory already."""
