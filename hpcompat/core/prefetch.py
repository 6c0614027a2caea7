"""Which groups to gather before they are needed (SCH-02, SCH-06, SCH-07)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcompat.contract.states import TrainingState
from hpcompat.core import events

if TYPE_CHECKING:
    from hpcompat.core.iteration import IteratedUnit
    from hpcompat.core.param_group import ParamGroup


def prefetch(group: ParamGroup, state: TrainingState) -> None:
    """Issue the gather of ``group`` as if it were in ``state``."""
    if events.listeners:
        events.emit("prefetch", group.fqn, state, source=group)
    kept = group.training_state
    group.training_state = state
    try:
        group.unshard(group.unshard_async_op)
    finally:
        group.training_state = kept


def prefetch_forward(units: Iterable[IteratedUnit]) -> None:
    """The explicit forward list: in order, as forward will need them."""
    for unit in units:
        for group in unit.groups:
            prefetch(group, TrainingState.FORWARD)
            unit.iteration.prefetched.append(group)


def prefetch_backward(units: Iterable[IteratedUnit]) -> None:
    """The explicit backward list: last group first, as backward will need them."""
    for unit in units:
        for group in reversed(unit.groups):
            prefetch(group, TrainingState.PRE_BACKWARD)


def prefetch_previous(group: ParamGroup) -> None:
    """The implicit backward prefetch: whatever ran forward just before ``group`` did.

    A wrong guess costs one gather, dropped at the end of backward. With several groups in a unit only the last but one
    in backward order prefetches, and it takes all groups of the unit before: late enough to hold no memory for long,
    early enough to overlap with the reduction of the last group.
    """
    if not group.post_forward_indices:
        return  # an earlier backward over the same forward has used them up
    index = group.post_forward_indices.pop()
    order = group.comm_ctx.post_forward_order
    if index >= len(order):
        return
    if group.num_groups == 1:
        if index > 0:
            prefetch(order[index - 1], TrainingState.PRE_BACKWARD)
        return
    if group.index != 1:
        return
    target = None
    for candidate in reversed(order[:index]):
        if candidate.unit is group.unit:
            continue
        if target is None:
            target = candidate.unit
        elif candidate.unit is not target:
            break
        prefetch(candidate, TrainingState.PRE_BACKWARD)
