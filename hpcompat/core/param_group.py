"""A param group: the parameters of a unit that are gathered in one collective and reduced in one.

It decides when to gather, free and reduce; :class:`hpcompat.contract.scheduler.GroupTensors` does it to the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hpcompat.contract.scheduler import GatherRequest, ReduceRequest
from hpcompat.contract.states import ShardedState, TrainingState
from hpcompat.core import agreement, events
from hpcompat.core.agreement import Agreement
from hpcompat.core.comm_ctx import CommContext
from hpcompat.core.division import Division
from hpcompat.mesh import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    shard_world_size,
)

if TYPE_CHECKING:
    from hpcompat.comm import AllGather, ReduceScatter
    from hpcompat.contract.backend import Backend
    from hpcompat.contract.distributed import Distributed
    from hpcompat.contract.scheduler import Gather, GradientBucket, GroupTensors, Pledge, Reduction


class OwningUnit(Protocol):
    """The unit, as far as its groups look into it."""

    def leave_forward(self) -> None: ...


class ParamGroup:
    """Parameters that share a mesh info and communicate together."""

    def __init__(
        self,
        tensors: GroupTensors,
        *,
        backend: Backend,
        mesh_info: DataParallelMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
    ) -> None:
        self.tensors = tensors
        self.mesh_info = mesh_info
        self.post_forward_mesh_info = post_forward_mesh_info
        self.fqn = ""
        self.unit: OwningUnit  # set by Unit.add_group
        self.comm_ctx: CommContext[ParamGroup] = CommContext()
        self.sharded_state = ShardedState.SHARDED
        self.training_state = TrainingState.IDLE
        # Place among the groups of the unit; set when the unit is built.
        self.index = 0
        self.num_groups = 1
        # Indices of this group's forwards in the shared order, latest last.
        self.post_forward_indices: list[int] = []

        # What the setters of HSDPModule change.
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.reshard_after_backward = True
        self.unshard_async_op = False
        self.unshard_in_backward = True
        self.reduce_scatter_unused_params = False
        self.max_input_buffers = 1
        self.all_gather_comm: AllGather | None = None
        self.reduce_scatter_comm: ReduceScatter | None = None
        # Whether the two above come from the user, not from an allocator switch.
        self.has_custom_comm = False
        self.all_reduce_hook: Callable[[Any], None] | None = None
        self.all_reduce_hook_stream: Any = None
        self.gradient_scaling_factor: Any = None
        self.division = Division(mesh_info, backend=backend)

        self.backend = backend
        self._agreement = Agreement(self, backend)
        self._is_prepared = False
        self._late_queued = False
        self._gather: Gather | None = None
        # The slice kept after forward is written on the current stream and read on the gather streams.
        self._post_forward_event: Any = None
        self.shard_world_size = shard_world_size(mesh_info)

    # Properties

    @property
    def is_unsharded(self) -> bool:
        return self.sharded_state is ShardedState.UNSHARDED

    @property
    def distributed(self) -> Distributed:
        return self.backend.distributed

    @property
    def is_hsdp(self) -> bool:
        return isinstance(self.mesh_info, HSDPMeshInfo)

    @property
    def is_sharded_by_mesh(self) -> bool:
        return isinstance(self.mesh_info, FSDPMeshInfo)

    @property
    def reduction_name(self) -> str:
        """Of the collective that ends a reduction; empty where nothing travels."""
        if self.all_reduce_grads and self.division.all_reduce_group is not None:
            return "all-reduce"
        return "reduce-scatter" if self.shard_world_size > 1 else ""

    def pending(self) -> tuple[str, ParamGroup] | None:
        """The gather in flight."""
        return None if self._gather is None else ("all-gather", self)

    # Unshard and reshard

    def prepare(self) -> None:
        """Lazy init of the group; also run by ``unshard`` before the first forward."""
        if not self._is_prepared:
            self.tensors.prepare()
            self._is_prepared = True

    def unshard(self, async_op: bool = False) -> None:
        """Issue the gather, unless it is pending, done, or switched off for backward."""
        if self._gather is not None or self.sharded_state is ShardedState.UNSHARDED:
            return
        if not self.unshard_in_backward and self.training_state is TrainingState.PRE_BACKWARD:
            return
        if events.listeners:
            events.emit("unshard", self.fqn, self.training_state, source=self)
        ctx = self.comm_ctx
        if self._post_forward_event is not None:
            ctx.make_gathers_wait(self._post_forward_event)
            self._post_forward_event = None
        copy_in_stream, gather_stream = ctx.gather_streams(async_op=async_op, state=self.training_state)
        group, world_size = self._gather_group()
        if agreement.is_debugging and world_size > 1:
            self._agreement.before_gather()
        # Without streams only a work object can overlap; a custom collective sees what its contract promises.
        issue_async = async_op or (not ctx.has_streams and self.all_gather_comm is None)
        self._gather = self.tensors.all_gather(
            GatherRequest(
                self.sharded_state,
                group,
                world_size,
                copy_in_stream,
                gather_stream,
                self.all_gather_comm,
                issue_async,
                ctx.takes_part,
                self,
            )
        )
        ctx.count_issued(self, "all-gather" if world_size > 1 else "")
        if events.observers:
            events.observe("gather_issued", self)

    def wait_for_unshard(self) -> None:
        """Finish the pending gather and register the unsharded parameters; without one, do nothing."""
        gather = self._gather
        if gather is None:
            return
        if events.listeners:
            events.emit("wait_for_unshard", self.fqn, self.training_state, source=self)
        ctx = self.comm_ctx
        in_forward = self.training_state is TrainingState.FORWARD
        if in_forward:
            ctx.release_held_gather()
        self.tensors.copy_out(gather)
        self.tensors.to_unsharded()
        self.sharded_state = ShardedState.UNSHARDED
        self._gather = None
        if self.training_state is TrainingState.IDLE:
            self._watch_gradients()
        if events.observers:
            events.observe("unsharded", self)
        if not ctx.has_streams:
            return
        event = ctx.streams.current().record_event()
        if in_forward and not gather.is_async and self.shard_world_size > 1:
            ctx.hold_gather(gather, event)  # [Note: held gather]
        else:
            ctx.make_gathers_wait(event)

    def reshard(self) -> None:
        """Free the unsharded parameters: inside forward by the policy (RSF-01 to RSF-03), always elsewhere."""
        if self.training_state is TrainingState.FORWARD:
            target = self.post_forward_mesh_info
            if target is None:
                return
            if target is not self.mesh_info:
                self._to_sharded_post_forward(target)
                return
        self.to_sharded()

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or a backward of the group is computing with the whole parameters."""
        return self.training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)

    def to_sharded_for_loading(self) -> None:
        """Before new values come from outside: nothing that was gathered from the old ones is left.

        Raises:
            RuntimeError: the group is in use.
        """
        if self.is_in_use:
            raise RuntimeError(
                "expected to load or convert parameters outside of forward and backward, but got it in those of unit "
                f"{self.fqn!r} ({self.training_state.name.lower()}); do it between steps. After a forward or backward "
                "that raised, call reset_iter_state() on the root first"
            )
        self.drop_gather()
        self.to_sharded()

    def _watch_gradients(self) -> None:
        """Whole parameters that are within reach outside of forward and backward may be computed with there."""
        if self.sharded_state is ShardedState.UNSHARDED:
            self.tensors.watch_gradients(self.note_gradient)

    def to_sharded(self) -> None:
        if self.sharded_state is not ShardedState.SHARDED:
            if events.listeners:
                events.emit("reshard", self.fqn, self.training_state, source=self)
            self.tensors.to_sharded()
            self.sharded_state = ShardedState.SHARDED

    def _to_sharded_post_forward(self, target: FSDPMeshInfo) -> None:
        if self.sharded_state is not ShardedState.UNSHARDED:
            return
        if events.listeners:
            events.emit("reshard_post_forward", self.fqn, self.training_state, source=self)
        self.tensors.to_sharded_post_forward(target)
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD
        if self.comm_ctx.has_streams:
            self._post_forward_event = self.comm_ctx.streams.current().record_event()

    def _gather_group(self) -> tuple[Any, int]:
        info: DataParallelMeshInfo | None = self.mesh_info
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            info = self.post_forward_mesh_info
        if isinstance(info, FSDPMeshInfo):
            return info.shard_process_group, info.shard_mesh_size
        return None, 1

    # Forward and backward

    def pre_forward(self) -> None:
        self.training_state = TrainingState.FORWARD
        self.unshard(self.unshard_async_op)
        self.wait_for_unshard()

    def post_forward(self, *, in_backward: bool) -> None:
        # Forward inside backward is recomputation: backward itself reshards, and its order is already recorded.
        if not in_backward:
            self.reshard()
            order = self.comm_ctx.post_forward_order
            self.post_forward_indices.append(len(order))
            order.append(self)
        self.training_state = TrainingState.IDLE
        self._watch_gradients()

    def pre_backward(self) -> bool:
        """Gather for backward. False if this backward has already done it."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            return False
        self.training_state = TrainingState.PRE_BACKWARD
        self.unshard(self.unshard_async_op)
        self.wait_for_unshard()
        return True

    def post_backward(self) -> None:
        """Free the parameters and reduce what gradients there are; does nothing harmful if there are none."""
        if events.listeners:
            events.emit("post_backward", self.fqn, self.training_state, source=self)
        if self.training_state is TrainingState.FORWARD:
            self.unit.leave_forward()  # never parts from its groups
        self.training_state = TrainingState.POST_BACKWARD
        self._reduce_gradients(reshard=self.reshard_after_backward)

    def reduce_new_gradients(self) -> None:
        """Reduce gradients that came outside of the group's own backward; the parameters stay as they are."""
        self._late_queued = False
        if self.tensors.has_new_gradients():
            self._reduce_gradients(reshard=False)
            self.comm_ctx.finish()

    def note_gradient(self) -> None:
        """Autograd has given a whole parameter a gradient. Whoever holds whole parameters may compute with them, also
        outside of the group's own backward, where nothing else would reduce the gradient before the next one.
        """
        is_expected = self.training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        if not is_expected and not self._late_queued:
            self._late_queued = True
            self.backend.queue_final_callback(self.reduce_new_gradients)

    def _reduce_gradients(self, *, reshard: bool) -> None:
        tensors = self.tensors
        tensors.accumulate_gradients()
        if not self.reduce_grads:
            if reshard:
                self.reshard()
            # After the reshard: the cast copy need not coexist with the parameters.
            tensors.stash_gradients()
            return
        buckets = tensors.take_gradients(fill_unused=self.reduce_scatter_unused_params)
        if reshard:
            self.reshard()
        # The last group of a unit goes first in backward; the unit's other groups then overlap with its reduction.
        if self.index == self.num_groups - 1:
            self.comm_ctx.make_room()
        pledge = self._agreement.before_reduction(tensors.missing_gradients(buckets))
        for bucket in buckets:
            self._reduce(bucket, pledge)

    def end_backward(self) -> None:
        """Run post-backward if autograd has not, or again for gradients that came after it. Such are those of a unit
        that a reentrant checkpoint runs twice, or of a cast that autocast has cached from a forward before.
        """
        if self.training_state is not TrainingState.POST_BACKWARD or (
            self.reduce_grads and self.tensors.has_new_gradients()
        ):
            self.post_backward()
        elif self.reshard_after_backward:
            self.reshard()
        self.training_state = TrainingState.IDLE
        self._watch_gradients()

    def reduce_zeros(self, missing: tuple[str, ...]) -> None:
        """Take part, for nothing, in a reduction of all gradients but these."""
        for bucket in self.tensors.zero_gradients(missing):
            reduction = self._start_reduce(bucket, None)
            reduction.abandon()

    def _reduce(self, bucket: GradientBucket, pledge: Pledge | None) -> None:
        if events.listeners:
            events.emit("reduce", self.fqn, self.training_state, source=self)
        self.comm_ctx.submit(self, self._start_reduce(bucket, pledge))

    def _start_reduce(self, bucket: GradientBucket, pledge: Pledge | None) -> Reduction:
        ctx = self.comm_ctx
        division = self.division
        all_reduce_group = division.all_reduce_group
        all_reduce_stream: Any = ctx.all_reduce_stream
        if all_reduce_group is None and self.all_reduce_hook_stream is not None:
            all_reduce_stream = self.all_reduce_hook_stream
        reduction = self.tensors.start_reduce(
            bucket,
            ReduceRequest(
                division.scatter_group,
                self.shard_world_size,
                all_reduce_group,
                self.all_reduce_grads,
                division.plan(bucket.overflow_risk),
                self.gradient_scaling_factor,
                self.reduce_scatter_comm,
                self.all_reduce_hook,
                ctx.reduce_stream,
                all_reduce_stream,
                ctx.takes_part,
                pledge,
                self,
            ),
        )
        ctx.count_issued(self, self.reduction_name)
        return reduction

    def finalize_backward(self) -> None:
        """End of the last backward: nothing pending is left behind."""
        self.tensors.wait_for_offload()
        self.drop_gather()
        self.post_forward_indices.clear()

    def drop_gather(self) -> None:
        """Wait for a gather that nobody used (a prefetch that guessed wrong) and drop it."""
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.wait()
            if events.observers:
                events.observe("gather_dropped", self)

    def reset_iter_state(self) -> None:
        """Back to a clean, sharded, idle group without pending gradients (REC-03, REC-04, REC-07)."""
        self.drop_gather()
        if self._post_forward_event is not None:
            self.comm_ctx.make_gathers_wait(self._post_forward_event)
            self._post_forward_event = None
        self.tensors.wait_for_offload()
        self.tensors.drop_gradients()
        self._late_queued = False
        self.post_forward_indices.clear()
        self.training_state = TrainingState.IDLE
        # Even if the state says so already: the exception may have come between a registration and its record.
        self.tensors.to_sharded()
        self.sharded_state = ShardedState.SHARDED
        if events.observers:
            events.observe("reset", self)
