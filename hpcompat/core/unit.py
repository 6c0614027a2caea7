"""A unit: the module or modules of one ``fully_shard`` call, and what happens around their forward and backward.

[Note: passes of a list]
The modules of a list are gathered for a pass: from the first of them that runs until all have run, or until the forward
of the root ends. A member that is called by itself, outside of any forward of a root, opens a pass that may never be
completed: a loss in chunks calls the head alone, each time with a backward of its own. So a pass also ends when its
backward does (``ParamGroup.post_backward``) and when another root's forward begins; where nothing is recorded it ends
with the call. Each member's output gathers for backward, since a member may run inside another, or again after the
gradients of an earlier call have freed the parameters.

The backend's hooks call the four methods ``pre_forward``, ``post_forward``, ``pre_backward`` and
``ParamGroup.post_backward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcompat.contract.states import ForwardEntry, TrainingState
from hpcompat.core import events, failure, prefetch
from hpcompat.core.comm_ctx import CommContext
from hpcompat.core.iteration import Iteration
from hpcompat.core.tree import Lent, give_back

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend
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
        self.iteration: Iteration[Unit] = Iteration()
        self.comm_ctx: CommContext[ParamGroup] = CommContext()
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        # Members of a module list that have not run in this pass, by position, and how many are running: a member may
        # run inside another.
        self._to_run: set[int] = set()
        self._num_running = 0
        self._end_of_pass_queued = False
        # By running module: tensors in the caller's containers for which others stand in.
        self.loans: list[list[Lent]] = []
        # The root whose forward ended while the pass was open.
        self._completed_by: Unit | None = None

    def add_group(self, group: ParamGroup) -> None:
        group.unit = self
        group.comm_ctx = self.comm_ctx
        self.groups.append(group)
        for index, member in enumerate(self.groups):
            member.index, member.num_groups = index, len(self.groups)

    def set_comm_ctx(self, comm_ctx: CommContext[ParamGroup]) -> None:
        self.comm_ctx = comm_ctx
        for group in self.groups:
            group.comm_ctx = comm_ctx

    @property
    def is_running(self) -> bool:
        """Whether the forward of one of the modules is under way."""
        return self.training_state is TrainingState.FORWARD and (len(self.modules) == 1 or self._num_running > 0)

    @property
    def is_forward_root(self) -> bool:
        return self.iteration.forward_root is self

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
        is_root = self._enter_root()
        if len(self.modules) > 1:
            if is_first:
                self._to_run.update(range(len(self.modules)))
            self._num_running += 1
        self.training_state = TrainingState.FORWARD
        for group in self.groups:
            group.pre_forward()
        if not is_first:
            return ForwardEntry.AGAIN  # [Note: passes of a list]
        if self.forward_prefetch:
            prefetch.prefetch_forward(self.forward_prefetch)
        return ForwardEntry.ROOT if is_root else ForwardEntry.FIRST

    def post_forward(self, index: int = 0, *, in_backward: bool, records: bool = True) -> tuple[Unit, ...]:
        """After forward of member ``index``. ``records`` says whether there may be a backward.

        Returns the units whose pre-backward hook belongs on the output: this one, and those that it completes.
        """
        if self.training_state is TrainingState.PRE_BACKWARD:
            return ()
        is_forward_root = self.iteration.forward_root is self
        is_complete = True
        if len(self.modules) > 1:
            self._to_run.discard(index)
            self._num_running = max(0, self._num_running - 1)
            is_complete = not self._num_running and (not self._to_run or (is_forward_root and not records))
        if is_complete:
            self._complete_forward(in_backward=in_backward)
        if not is_forward_root or self._num_running:
            return (self,)
        self.comm_ctx.release_held_gather()
        self.iteration.forward_root = None
        self._drop_unused_prefetches()
        return (self, *self._complete_open_units(in_backward=in_backward))

    def _complete_forward(self, *, in_backward: bool) -> None:
        for group in self.groups:
            group.post_forward(in_backward=in_backward)
        self.leave_forward()
        if events.listeners:
            events.emit("post_forward", self.fqn, self.training_state, source=self)

    def leave_forward(self) -> None:
        """The pass is over, whether or not all modules have run. [Note: passes of a list]"""
        self._to_run.clear()
        self._num_running = 0
        self.training_state = TrainingState.IDLE

    def return_loans(self) -> None:
        """Put back the caller's tensors that forwards which raised have left."""
        while self.loans:
            give_back(self.loans.pop())

    def _complete_open_units(self, *, in_backward: bool) -> list[Unit]:
        """Units of the tree that have not run in whole, or whose forward has raised: deepest first, as forward would
        have unwound them.
        """
        units = reversed(self.iteration.units)
        open_units = [unit for unit in units if unit is not self and unit.training_state is TrainingState.FORWARD]
        for unit in open_units:
            unit._complete_forward(in_backward=in_backward)
            unit._completed_by = self
        return open_units

    def _drop_unused_prefetches(self) -> None:
        """What was gathered ahead for this forward is not for the next one: the weights may be others by then."""
        prefetched, self.iteration.prefetched = self.iteration.prefetched, []
        for group in prefetched:
            group.drop_gather()

    def _ensure_unsharded(self) -> None:
        # With several forwards before one backward, an earlier post-backward may have resharded.
        for group in self.groups:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()

    def _enter_root(self) -> bool:
        """Run what happens once per forward; True if this unit is its root."""
        if self.is_root is None:
            init_root(self)
        iteration = self.iteration
        if iteration.forward_root is not None:
            return False
        iteration.forward_root = self
        if len(self.modules) == 1:
            self._complete_open_units(in_backward=False)  # [Note: passes of a list]
        ctx = self.comm_ctx
        if iteration.post_optim_event is not None:
            ctx.make_gathers_wait(iteration.post_optim_event)
            iteration.post_optim_event = None
        elif ctx.has_streams:
            ctx.make_gathers_follow_current_stream()
        return True

    # Backward

    def pre_backward(self) -> None:
        """At a gradient of an output: gather again, and prefetch what backward needs next (SCH-02)."""
        if len(self.modules) > 1 and self._is_in_backward:
            return  # by the output of another member
        if self.training_state is not TrainingState.FORWARD and self._completed_by is not None:
            # The output of a member may be the root's own: gathers keep the order of the modules.
            completer, self._completed_by = self._completed_by, None
            completer.pre_backward()
        if events.listeners:
            events.emit("pre_backward", self.fqn, self.training_state, source=self)
        if self.training_state is TrainingState.FORWARD:
            self._end_pass_with_backward()
            return
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

    @property
    def _is_in_backward(self) -> bool:
        state = TrainingState.PRE_BACKWARD
        return self.training_state is state and all(group.training_state is state for group in self.groups)

    def _end_pass_with_backward(self) -> None:
        """The backward of a member whose pass is open has begun: its parameters are there, and the backward of the rest
        of the tree is still to come. [Note: passes of a list]
        """
        if not self._end_of_pass_queued:
            self._end_of_pass_queued = True
            self.backend.queue_final_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._end_of_pass_queued = False
        if not self.iteration.final_callback_queued:  # which ends this unit with the others
            self.end_backward()
            self.comm_ctx.finish()

    def end_backward(self) -> None:
        """From the final callback: run post-backward where autograd did not, and become idle."""
        if self.is_running:  # backward was called inside of this forward
            for group in reversed(self.groups):
                group.reduce_new_gradients()
            return
        self.leave_forward()
        self._completed_by = None
        for group in reversed(self.groups):
            group.end_backward()

    def reset_iter_state(self) -> None:
        self.leave_forward()
        self._end_of_pass_queued = False
        self._completed_by = None
        self.return_loans()
        for group in self.groups:
            group.reset_iter_state()
        if events.observers:
            events.observe("reset", self)


# Lazy init


def init_root(root: Unit) -> None:
    """Make ``root`` the root of every unit below it.

    Raises:
        RuntimeError: ``root`` has several modules, or a unit below was the root of an earlier forward.
    """
    if len(root.modules) > 1:
        raise RuntimeError(
            f"{root.label} requires a single root module but got {len(root.modules)} modules: "
            f"{[type(module).__name__ for module in root.modules]}; run forward through a module that holds them all "
            "and is wrapped"
        )
    units = _collect_units(root)
    _bind_names(root, units)
    for unit in units:
        for group in unit.groups:
            group.prepare()
    _check_buffers(root)
    # Only now, so that a refused forward can be mended and tried again.
    for unit in units:
        unit.is_root = unit is root
    _share(root, units)
    failure.watch(root)
    if root.auto_reshard_after_forward:
        # The root's parameters are the first that backward needs.
        for group in root.groups:
            group.post_forward_mesh_info = None


def _check_buffers(root: Unit) -> None:
    on_meta = root.backend.buffers_on_meta(root.modules[0])
    if on_meta:
        raise RuntimeError(
            "expected buffers to be materialized from meta device before training, but got buffers on it: "
            f"{on_meta}; call module.to_empty(device=...) and compute them again (no state dict holds the "
            "non-persistent ones)"
        )


def _collect_units(root: Unit) -> list[Unit]:
    units: list[Unit] = []
    for name, module in root.backend.named_modules(root.modules[0]):
        unit = unit_of(module)
        if unit is None:
            continue
        if unit not in units:
            if unit is not root and unit.is_root is not None:
                raise RuntimeError(
                    f"{root.label} state has already been lazily initialized for {name}: expected one root per tree, "
                    f"but got a forward of {root.fqn!r} after one of {name!r}; run forward through the root module "
                    "first"
                )
            unit.fqn = name
            units.append(unit)
        else:
            unit.fqn = f"{unit.fqn}, {name}" if unit.fqn else name
    return units


def _share(root: Unit, units: list[Unit]) -> None:
    root.comm_ctx.lazy_init(root.backend.streams(root.device))
    iteration = root.iteration
    iteration.units = units
    caps = [group.max_input_buffers for unit in units for group in unit.groups]
    # A context shared with other roots keeps the largest cap of all.
    root.comm_ctx.max_input_buffers = max([root.comm_ctx.max_input_buffers, *caps])
    for unit in units:
        unit.iteration = iteration
        unit.set_comm_ctx(root.comm_ctx)


def _bind_names(root: Unit, units: list[Unit]) -> None:
    prefixes: dict[Any, str] = {}
    for name, module in root.backend.named_modules(root.modules[0]):
        prefixes.setdefault(module, f"{name}." if name else "")
    for unit in units:
        for group in unit.groups:
            group.fqn = unit.fqn
            group.tensors.bind_names(prefixes)
