"""Which state of a unit or a param group may follow which."""

from __future__ import annotations

from hpcompat.contract.states import ShardedState, TrainingState

SHARDED_TRANSITIONS: frozenset[tuple[ShardedState, ShardedState]] = frozenset(
    {
        (ShardedState.SHARDED, ShardedState.UNSHARDED),
        (ShardedState.SHARDED_POST_FORWARD, ShardedState.UNSHARDED),
        (ShardedState.UNSHARDED, ShardedState.SHARDED),
        (ShardedState.UNSHARDED, ShardedState.SHARDED_POST_FORWARD),
        (ShardedState.SHARDED_POST_FORWARD, ShardedState.SHARDED),
    }
)

# Besides these, ``reset_iter_state`` leads from anywhere to IDLE, and a prefetch lends a group a state as it gathers.

_S = TrainingState

# A unit.
UNIT_TRANSITIONS: frozenset[tuple[TrainingState, TrainingState]] = frozenset(
    {
        (_S.IDLE, _S.FORWARD),
        (_S.FORWARD, _S.IDLE),
        (_S.IDLE, _S.PRE_BACKWARD),
        (_S.PRE_BACKWARD, _S.IDLE),
    }
)

# A param group. Without an output gradient it goes to POST_BACKWARD straight from IDLE, in the final callback, or from
# FORWARD, when a module list ran in part; a module called several times comes back from POST_BACKWARD to PRE_BACKWARD.
GROUP_TRANSITIONS: frozenset[tuple[TrainingState, TrainingState]] = frozenset(
    {
        (_S.IDLE, _S.FORWARD),
        (_S.FORWARD, _S.IDLE),
        (_S.IDLE, _S.PRE_BACKWARD),
        (_S.PRE_BACKWARD, _S.POST_BACKWARD),
        (_S.IDLE, _S.POST_BACKWARD),
        (_S.FORWARD, _S.POST_BACKWARD),
        (_S.POST_BACKWARD, _S.PRE_BACKWARD),
        (_S.POST_BACKWARD, _S.IDLE),
    }
)
