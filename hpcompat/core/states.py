"""The states of units and param groups, and which state may follow which."""

from __future__ import annotations

from enum import Enum, auto


class ShardedState(Enum):
    """Where the parameters of a param group live.

    ``SHARDED``: only the shard exists and is registered on the modules.
    ``SHARDED_POST_FORWARD``: after forward with an integer ``reshard_after_forward`` a slice over the smaller group
    exists beside the shard; it is registered but must not be computed with.
    ``UNSHARDED``: the full parameter exists beside the shard and is registered.
    """

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()


class TrainingState(Enum):
    """What a unit or a param group is doing."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class ForwardEntry(Enum):
    """What a forward pre-hook found when it entered a unit; tells the backend what to do with the inputs.

    ``RECOMPUTE``: activation checkpointing runs forward inside backward; inputs are only cast.
    ``AGAIN``: a later member of a module list in the same pass; inputs are only cast.
    ``FIRST``: the first member of a pass; the inputs get the post-backward node.
    ``ROOT``: as ``FIRST``, and this unit is the forward root; inputs move to the device as well.
    """

    RECOMPUTE = auto()
    AGAIN = auto()
    FIRST = auto()
    ROOT = auto()


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
