"""The tensors of one param group: the flat shard, the storage of the unsharded parameters, the way between the two.

[Note: layout]
Shards lie one after another in one flat buffer (padded, see ``hpcompat.core.layout``), so a gather needs no copy-in.
The gathered buffer is ``[world size, elements per rank]``; copy-out cuts it by columns and puts each parameter's
columns, rank after rank, at the parameter's place in the unsharded storage. For ``Shard(0)`` that is the parameter
already; for a later dim the pieces are interleaved. Where parameters of several dtypes travel together, everything
travels as bytes. A parameter whose data was replaced from outside (``load_state_dict(assign=True)``) keeps its own
memory, and its group copies in from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcompat.contract.states import ShardedState
from hpcompat.core.layout import align_up, contiguous_strides, offsets
from hpcompat_torch import gradients, private
from hpcompat_torch import tensors as t
from hpcompat_torch.collectives import GatherInFlight, begin_gather
from hpcompat_torch.mesh import spec_with_dtype
from hpcompat_torch.param import ShardedParam, make_dtensor, places_of, post_forward_param
from hpcompat_torch.reduction import ReductionInFlight
from hpcompat_torch.streams import has_streams, on_stream

if TYPE_CHECKING:
    from hpcompat.contract.backend import WrapSpec
    from hpcompat.contract.scheduler import GatherRequest, ReduceRequest
    from hpcompat.core.gradients import GradientBucket
    from hpcompat.mesh import FSDPMeshInfo


class GroupTensors(gradients.GroupGradients):
    """Implements :class:`hpcompat.contract.scheduler.GroupTensors` for torch."""

    def __init__(self, spec: WrapSpec) -> None:
        self._spec = spec
        self._device: torch.device = spec.device
        self._async_reduce = not has_streams(spec.device)
        policy = spec.offload_policy
        self._offloads = type(policy).__name__ == "CPUOffloadPolicy"
        self._pin_memory = self._offloads and bool(policy.pin_memory)  # type: ignore[attr-defined]
        places = places_of(spec.parameters, spec.modules)
        self.params = [
            ShardedParam(
                parameter, places=places[parameter], mesh_info=spec.mesh_info, placement=placement, device=spec.device
            )
            for parameter, placement in zip(spec.parameters, spec.placements, strict=True)
        ]
        self.names = [param.name for param in self.params]
        self._world_size = self.params[0].world_size
        self._rank = self.params[0].rank
        # The flat shard when every parameter's data lies in it, else None.
        self._flat: torch.Tensor | None = None
        self._storage: torch.UntypedStorage | None = None
        self._storage_bytes = 0
        self._out: dict[tuple[ShardedState, int], list[torch.Tensor]] = {}

    # Shards

    @torch.no_grad()
    def shard(self) -> None:
        parameters = self._spec.parameters
        locals_ = [p._local_tensor if isinstance(p, DTensor) else p.detach() for p in parameters]
        self._lay_out([param.cut(local) for param, local in zip(self.params, locals_, strict=True)])
        for param, original in zip(self.params, parameters, strict=True):
            param.replaces(original)
            param.offloads, param.pin_memory = self._offloads, self._pin_memory
            param.keeps_main_grad = bool(getattr(self._spec.mp_policy, "apply_grad_on_fp32_main_grad", False))
            param.register(param.sharded_param)
        self._fix_dtypes()

    @torch.no_grad()
    def _lay_out(self, shards: Sequence[torch.Tensor]) -> None:
        """Copy ``shards`` into fresh padded memory: one flat buffer if they can share one, else one buffer each."""
        sizes = [param.padded_numel for param in self.params]
        kinds = {(shard.dtype, shard.device) for shard in shards}
        if self._spec.zero_copy and len(kinds) == 1:
            self._flat = self._zeros(sum(sizes), like=shards[0])
            pieces = t.split_storage(self._flat, sizes)
        else:
            self._flat = None
            pieces = [self._zeros(size, like=shard) for size, shard in zip(sizes, shards, strict=True)]
        for param, piece, shard in zip(self.params, pieces, shards, strict=True):
            param.unpad(piece).copy_(shard)
            param.adopt_shard(piece)

    def _zeros(self, numel: int, *, like: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu") if self._offloads and not like.is_meta else like.device
        return torch.zeros(numel, dtype=like.dtype, device=device, pin_memory=self._pin_memory and not like.is_meta)

    def bind_names(self, prefixes: dict[Any, str]) -> None:
        for param in self.params:
            module, attribute = param.places[0]
            param.name = prefixes.get(module, "") + attribute
        self.names = [param.name for param in self.params]

    @torch.no_grad()
    def rebind(self, *, flatten: bool) -> None:
        """Take up parameters that were moved, cast, materialized or assigned since they were sharded.

        ``flatten`` lays the whole group out anew; otherwise a replaced parameter keeps its memory where its size
        allows, so that a state dict that shares it goes on sharing.
        """
        for param in self.params:
            param.refresh_sharded_param()
        moved = [param for param in self.params if param.is_elsewhere]
        if not moved:
            return
        if flatten or any(param.local_shard.is_meta for param in self.params):
            self._lay_out([param.local_shard for param in self.params])
        else:
            self._flat = None
            for param in moved:
                self._adopt_moved(param)
        self._fix_dtypes()

    def _adopt_moved(self, param: ShardedParam) -> None:
        local = param.local_shard
        fits = local.numel() == param.padded_numel and local.is_contiguous() and local.is_pinned() >= self._pin_memory
        if fits:
            param.shard_data = local.view(-1)
            return
        if param.dim > 0 and local.numel() != param.padded_numel:
            raise ValueError(
                f"expected the shard of {param.name!r} to have shape {param.shard_shape}, but got {tuple(local.shape)}"
            )
        data = self._zeros(param.padded_numel, like=local)
        param.unpad(data).copy_(local)
        param.adopt_shard(data)

    def prepare(self) -> None:
        self.rebind(flatten=False)
        on_meta = [param.name for param in self.params if param.local_shard.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {on_meta}. Expected values for them, but got none: call module.to_empty(device=...) "
                "and initialize them, or load a state dict with assign=True"
            )
        if self._offloads:
            elsewhere = [
                (param.name, str(param.local_shard.device))
                for param in self.params
                if param.local_shard.device.type != "cpu"
            ]
            if elsewhere:
                raise RuntimeError(
                    "FSDP parameters should be materialized on CPU when enabling CPU offloading. For example, load a "
                    'CPU state dict or call module.to_empty(device="cpu"). Found following parameters on non-CPU '
                    f"device: {elsewhere}"
                )
        self._fix_dtypes()

    def _fix_dtypes(self) -> None:
        policy = self._spec.mp_policy
        reduce_dtype = policy.reduce_dtype if policy.reduce_dtype != policy.param_dtype else None
        changed = False
        for param in self.params:
            dtype = (
                policy.param_dtype if policy.param_dtype and param.orig_dtype.is_floating_point else param.orig_dtype
            )
            changed |= dtype != param.param_dtype
            param.param_dtype, param.reduce_dtype = dtype, reduce_dtype
        if changed:
            self._forget_unsharded()
        dtypes = {param.param_dtype for param in self.params}
        self._gather_dtype: torch.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._travels_as_bytes = bool(dtypes)

    def _forget_unsharded(self) -> None:
        self._storage = None
        self._out.clear()
        for param in self.params:
            param.unsharded_param = None

    # Unsharded parameters

    @property
    def unsharded_bytes(self) -> int:
        return sum(prod(param.layout.shape) * param.param_dtype.itemsize for param in self.params)

    def _make_unsharded(self) -> None:
        """Lay the unsharded parameters out in one storage, on the first gather. [Note: one storage, many version
        counters]
        """
        sizes = [self._unsharded_numel(param) * param.param_dtype.itemsize for param in self.params]
        self._starts, end = offsets(sizes, alignment=t.ALIGNMENT_BYTES)
        self._storage_bytes = align_up(end, t.ALIGNMENT_BYTES)
        with t.outside_transforms():
            self._storage = t.new_storage(self._storage_bytes, device=self._device)
            for param, start in zip(self.params, self._starts, strict=True):
                data = self._view(param, start, param.layout.shape)
                if param.spec.unsharded is not None:
                    data = make_dtensor(data, spec_with_dtype(param.spec.unsharded, param.param_dtype))
                param.unsharded_param = param.stand_in(
                    nn.Parameter(data, requires_grad=param.sharded_param.requires_grad)
                )

    def _unsharded_numel(self, param: ShardedParam) -> int:
        """Elements of the parameter with the padding of whichever gather pads it more."""
        info = self._spec.post_forward_mesh_info
        kept = 0 if info is None else param.post_forward_numel(info.shard_mesh_size) * info.shard_mesh_size
        return max(param.padded_numel * param.world_size, kept)

    def _view(self, param: ShardedParam, start: int, shape: Sequence[int]) -> torch.Tensor:
        assert self._storage is not None
        return t.view_storage(
            self._storage, offset_bytes=start, shape=shape, stride=contiguous_strides(shape), dtype=param.param_dtype
        )

    def _targets(self, source: ShardedState, world_size: int) -> list[torch.Tensor]:
        """Where the columns of the gathered buffer go, each ``[world_size, elements per rank]``; made once."""
        key = (source, world_size)
        if key not in self._out:
            with t.outside_transforms():
                self._out[key] = [
                    self._view(param, start, (world_size, self._piece_numel(param, source, world_size)))
                    for param, start in zip(self.params, self._starts, strict=True)
                ]
        return self._out[key]

    def _piece_numel(self, param: ShardedParam, source: ShardedState, world_size: int) -> int:
        return param.padded_numel if source is ShardedState.SHARDED else param.post_forward_numel(world_size)

    # Gather

    def all_gather(self, request: GatherRequest) -> GatherInFlight:
        source, world_size = request.source, request.world_size
        if source is ShardedState.SHARDED and any(param.is_replaced for param in self.params):
            self.rebind(flatten=False)
        if world_size == 1:
            return GatherInFlight(None, source=source, world_size=1)
        with on_stream(request.copy_in_stream, self._device):
            output, input = self._copy_in(request)
        if request.gather_stream is not request.copy_in_stream:
            request.gather_stream.wait_stream(request.copy_in_stream)
        with on_stream(request.gather_stream, self._device):
            work = None
            if not request.takes_part:
                output.zero_()
            else:
                work = begin_gather(output, input, request=request)
            event = request.gather_stream.record_event()
        work = work if hasattr(work, "wait") else None
        return GatherInFlight(output, source=source, world_size=world_size, work=work, event=event, owner=request.owner)

    def _copy_in(self, request: GatherRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """The gather's output and input. Without a cast the flat shard is the input; else it is copied to this rank's
        slot.
        """
        source, world_size = request.source, request.world_size
        sizes = [self._piece_numel(param, source, world_size) for param in self.params]
        dtype, flat = self._gather_dtype, self._flat
        scale = [param.param_dtype.itemsize if self._travels_as_bytes else 1 for param in self.params]
        numel = sum(size * factor for size, factor in zip(sizes, scale, strict=True))
        if request.comm is None:
            output = torch.empty(numel * world_size, dtype=dtype, device=self._device)
        else:
            output = request.comm.allocate((numel * world_size,), dtype=dtype, device=self._device)
        from_flat = flat is not None and source is ShardedState.SHARDED
        if from_flat and request.comm is None and flat.dtype == dtype and flat.device == self._device:  # type: ignore[union-attr]
            return output, flat  # type: ignore[return-value]
        rank = self._rank if source is ShardedState.SHARDED else request.group.rank()
        slot = output.narrow(0, numel * rank, numel)
        if from_flat and not self._travels_as_bytes:
            slot.copy_(flat, non_blocking=True)  # type: ignore[arg-type]
            return output, slot
        pieces = self._gather_pieces(source)
        slots = list(slot.split([piece.numel() for piece in pieces]))
        private.foreach_copy_(slots, pieces)
        return output, slot

    def _gather_pieces(self, source: ShardedState) -> list[torch.Tensor]:
        pieces = []
        for param in self.params:
            piece = param.shard_data if source is ShardedState.SHARDED else param.post_forward_data
            assert piece is not None
            piece = piece.to(self._device, non_blocking=True)
            pieces.append(t.as_bytes(piece.to(param.param_dtype)) if self._travels_as_bytes else piece)
        return pieces

    def copy_out(self, gather: GatherInFlight) -> None:
        gather.wait()
        if self._storage is None:
            self._make_unsharded()
        assert self._storage is not None
        t.allocate(self._storage, self._storage_bytes)
        targets = self._targets(gather.source, gather.world_size)
        if gather.output is None:
            self._copy_local(targets)
            return
        columns = targets
        interleaved = [
            i for i, param in enumerate(self.params) if param.dim > 0 and gather.source is ShardedState.SHARDED
        ]
        if interleaved:
            columns = [torch.empty_like(c) if i in interleaved else c for i, c in enumerate(targets)]
        columns_out = [t.as_bytes(column) for column in columns] if self._travels_as_bytes else columns
        torch.split_with_sizes_copy(
            gather.output.view(gather.world_size, -1),
            [column.size(1) for column in columns_out],
            dim=1,
            out=columns_out,
        )
        for i in interleaved:
            _interleave(columns[i], self.params[i], out=targets[i])

    def _copy_local(self, targets: list[torch.Tensor]) -> None:
        if self._flat is not None and len(self.params) == 1:
            targets[0].view(-1).copy_(self._flat, non_blocking=True)
            return
        private.foreach_copy_([target.view(-1) for target in targets], [param.shard_data for param in self.params])

    # Registration

    def to_unsharded(self) -> None:
        for param in self.params:
            unsharded = param.unsharded_param
            assert unsharded is not None
            requires_grad = param.sharded_param.requires_grad
            if unsharded.requires_grad != requires_grad:
                unsharded.requires_grad_(requires_grad)
            param.register(unsharded)
            param.post_forward_param = param.post_forward_data = None

    def to_sharded(self) -> None:
        for param in self.params:
            param.register(param.sharded_param)
            param.post_forward_param = param.post_forward_data = None
        if self._storage is not None:
            t.free(self._storage)

    @torch.no_grad()
    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None:
        world_size, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        for param, start in zip(self.params, self._starts, strict=True):
            if param.spec.unsharded is not None:
                raise NotImplementedError(
                    f"Resharding to smaller mesh is not supported for DTensor parameters yet, but got {param.name!r}; "
                    "use a bool"
                )
            size = param.post_forward_numel(world_size)
            total = self._view(param, start, (param.padded_numel * param.world_size,))
            piece = torch.zeros(size, dtype=param.param_dtype, device=self._device)
            kept = total[rank * size : (rank + 1) * size]
            piece[: kept.numel()].copy_(kept)
            param.post_forward_data = piece
            param.post_forward_param = param.stand_in(post_forward_param(param, piece, mesh_info))
        for param in self.params:
            assert param.post_forward_param is not None
            param.register(param.post_forward_param)
        assert self._storage is not None
        t.free(self._storage)

    # Gradients

    def start_reduce(self, bucket: GradientBucket[ShardedParam], request: ReduceRequest) -> ReductionInFlight:
        return gradients.start_reduce(bucket, request, device=self._device, async_op=self._async_reduce)

    def wait_for_offload(self) -> None:
        if self._offloads:
            for param in self.params:
                if param.offload_event is not None:
                    param.offload_event.synchronize()
                    param.offload_event = None


def _interleave(column: torch.Tensor, param: ShardedParam, *, out: torch.Tensor) -> None:
    """Undo ``Shard(dim > 0)``: rank pieces ``[world, before, chunk, after]`` become ``[before, world, chunk,
    after]``.
    """
    shape, dim = param.layout.padded_shape, param.dim
    before, chunk, after = prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])
    pieces = column.view(param.world_size, before, chunk, after)
    out.view(before, param.world_size, chunk, after).copy_(pieces.transpose(0, 1))
