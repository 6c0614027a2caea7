"""The states of units and param groups."""

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
