"""A unit: the module or modules of one ``fully_shard`` call, and what happens around their forward and backward.

The backend's hooks call the four methods ``pre_forward``, ``post_forward``, ``pre_backward`` and
``ParamGroup.post_backward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcompat.core import events, prefetch
from hpcompat.core.comm_ctx import CommContext
from hpcompat.core.iteration import Iteration, init_root
from hpcompat.core.states import ForwardEntry, TrainingState

if TYPE_CHECKING:
    from hpcompat.backend import Backend
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.policy import MixedPrecisionPolicy

UNIT_KEY = "_hpcompat_unit"


def unit_of(module: Any) -> Unit | None:
    """The unit that ``module`` is the (or a) root module of."""
    unit = module.__dict__.get(UNIT_KEY)
    return unit if isinstance(unit, Unit) else None


class Unit:
    """Modules that are gathered together, with zero or more param groups (one per mesh info)."""

    def __init__(
        self,
        modules: tuple[Any, ...],
        *,
        backend: Backend,
        device: Any,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
        label: str,
    ) -> None:
        self.modules = modules
        self.backend = backend
        self.device = device
        self.mp_policy = mp_policy
        self.label = label
        # True while reshard_after_forward=None: lazy init then keeps the root unsharded after forward.
        self.auto_reshard_after_forward = auto_reshard_after_forward
        self.groups: list[ParamGroup] = []
        self.fqn = ""
        self.is_root: bool | None = None  # decided by lazy init
        self.training_state = TrainingState.IDLE
        self.iteration = Iteration()
        self.comm_ctx = CommContext()
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        # Members of a module list that have not run in this pass, by position.
        self._to_run: set[int] = set()

    def add_group(self, group: ParamGroup) -> None:
        group.unit = self
        group.comm_ctx = self.comm_ctx
        self.groups.append(group)
        for index, member in enumerate(self.groups):
            member.index, member.num_groups = index, len(self.groups)

    def set_comm_ctx(self, comm_ctx: CommContext) -> None:
        self.comm_ctx = comm_ctx
        for group in self.groups:
            group.comm_ctx = comm_ctx

    @property
    def ran_in_part(self) -> bool:
        """Whether some but not all members of a module list have run in this pass."""
        return bool(self._to_run)

    # Forward

    def pre_forward(self, index: int = 0) -> ForwardEntry:
        """Before forward of member ``index``: gather, wait, prefetch (SCH-01, SCH-06)."""
        if events.listeners:
            events.emit("pre_forward", self.fqn, self.training_state, source=self)
        if self.training_state is TrainingState.PRE_BACKWARD:
            self._ensure_unsharded()
            return ForwardEntry.RECOMPUTE
        is_first = self.training_state is not TrainingState.FORWARD
        # Before any state changes: a refused lazy init must be met again by the next forward.
        is_root = is_first and self._enter_root()
        if len(self.modules) > 1 and not self._to_run:
            self._to_run.update(range(len(self.modules)))
        self.training_state = TrainingState.FORWARD
        for group in self.groups:
            group.pre_forward()
        if not is_first:
            return ForwardEntry.AGAIN
        if self.forward_prefetch:
            prefetch.prefetch_forward(self.forward_prefetch)
        return ForwardEntry.ROOT if is_root else ForwardEntry.FIRST

    def post_forward(self, index: int = 0, *, in_backward: bool) -> tuple[Unit, ...]:
        """After forward of member ``index``.

        Returns the units that this output completes: each needs its pre-backward hook on the output.
        """
        if self.training_state is TrainingState.PRE_BACKWARD:
            return ()
        if len(self.modules) > 1:
            if index not in self._to_run:
                return ()
            self._to_run.remove(index)
            if self._to_run:
                return ()
        self._complete_forward(in_backward=in_backward)
        if self.iteration.forward_root is not self:
            return (self,)
        completed = (self, *self._complete_partial_units(in_backward=in_backward))
        self.comm_ctx.release_held_gather()
        self.iteration.forward_root = None
        return completed

    def _complete_forward(self, *, in_backward: bool) -> None:
        for group in self.groups:
            group.post_forward(in_backward=in_backward)
        self._to_run.clear()
        self.training_state = TrainingState.IDLE
        if events.listeners:
            events.emit("post_forward", self.fqn, self.training_state, source=self)

    def _complete_partial_units(self, *, in_backward: bool) -> list[Unit]:
        # Deepest first, as forward would have unwound them.
        partial = [unit for unit in reversed(self.iteration.units) if unit is not self and unit.ran_in_part]
        for unit in partial:
            unit._complete_forward(in_backward=in_backward)
        return partial

    def _ensure_unsharded(self) -> None:
        # With several forwards before one backward, an earlier post-backward may have resharded.
        for group in self.groups:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()

    def _enter_root(self) -> bool:
        """Run what happens once per forward; True if this unit is its root."""
        if self.is_root is None:
            init_root(self, unit_of=unit_of)
        iteration = self.iteration
        if iteration.forward_root is not None:
            return False
        iteration.forward_root = self
        ctx = self.comm_ctx
        if iteration.post_optim_event is not None:
            ctx.make_gathers_wait(iteration.post_optim_event)
            iteration.post_optim_event = None
        elif ctx.has_streams:
            ctx.make_gathers_follow_current_stream()
        return True

    # Backward

    def pre_backward(self) -> None:
        """At the first gradient of an output: gather again, and prefetch what backward needs next (SCH-02)."""
        if events.listeners:
            events.emit("pre_backward", self.fqn, self.training_state, source=self)
        self.training_state = TrainingState.PRE_BACKWARD
        iteration = self.iteration
        if not iteration.final_callback_queued:
            iteration.final_callback_queued = True
            self.backend.queue_final_callback(iteration.final_callback)
        for group in self.groups:
            if group.pre_backward() and not self.backward_prefetch:
                prefetch.prefetch_previous(group)
        if self.backward_prefetch:
            prefetch.prefetch_backward(self.backward_prefetch)

    def end_backward(self) -> None:
        """From the final callback: run post-backward where autograd did not, and become idle."""
        self._to_run.clear()
        for group in reversed(self.groups):
            group.end_backward()
        self.training_state = TrainingState.IDLE

    def reset_iter_state(self) -> None:
        self._to_run.clear()
        self.training_state = TrainingState.IDLE
        for group in self.groups:
            group.reset_iter_state()
        if events.observers:
            events.observe("reset", self)
