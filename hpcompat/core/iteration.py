"""What the units of one root share over an iteration: the root, the last-backward mark, the final callback.

The root is the first unit that runs forward; everything below it then belongs to it (ENT-13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hpcompat.contract.states import TrainingState
from hpcompat.core import events

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend
    from hpcompat.core.comm_ctx import CommContext
    from hpcompat.core.param_group import ParamGroup


class IteratedUnit(Protocol):
    """A unit, as far as what it shares with the others of its root looks into it."""

    @property
    def backend(self) -> Backend: ...
    @property
    def groups(self) -> list[ParamGroup]: ...
    @property
    def comm_ctx(self) -> CommContext[ParamGroup]: ...
    @property
    def iteration(self) -> Iteration[Any]: ...
    @property
    def is_running(self) -> bool: ...
    def end_backward(self) -> None: ...
    def reset_iter_state(self) -> None: ...


Unit = TypeVar("Unit", bound=IteratedUnit)


class Iteration(Generic[Unit]):
    """Kept per root, never globally: two roots (pipeline stages) must not see each other's marks."""

    def __init__(self) -> None:
        # Units in module pre-order, without duplicates.
        self.units: list[Unit] = []
        # First unit entered in the running forward; it may be below the root, as when an encoder is evaluated alone.
        self.forward_root: Unit | None = None
        self.final_callback_queued = False
        # Groups that the explicit forward prefetch has gathered in the running forward.
        self.prefetched: list[ParamGroup] = []
        self.is_last_backward = True
        self.post_optim_event: Any = None

    def final_callback(self) -> None:
        """End of a backward: every unit has reduced, and after the last one nothing is pending."""
        if events.listeners:
            events.emit("final_callback", "", TrainingState.POST_BACKWARD, source=self.units[0] if self.units else None)
        self.final_callback_queued = False
        if self.forward_root is not None and not self.forward_root.is_running:
            self.forward_root = None
        for unit in self.units:
            unit.end_backward()
        if self.units:
            self.units[0].comm_ctx.end_backward(is_last=self.is_last_backward)
        if self.is_last_backward:
            for unit in self.units:
                for group in unit.groups:
                    group.finalize_backward()

    def reset(self) -> None:
        """After an exception: as if the failed iteration had never been (REC-07)."""
        if self.units:
            self.units[0].comm_ctx.reset()
        for unit in self.units:
            unit.reset_iter_state()
        self.forward_root = None
        self.prefetched.clear()
        self.final_callback_queued = False
