"""What crosses the seam between the scheduler and a backend while a model trains.

The seam is a param group wide, not a parameter wide: one call moves, registers or reduces everything that travels in
one collective, so that the cost of the seam does not grow with the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.contract.distributed import Distributed
from hpcompat.contract.states import ForwardEntry, ShardedState, TrainingState
from hpcompat.mesh import FSDPMeshInfo
from hpcompat.policy import MixedPrecisionPolicy

# Streams


class Stream(Protocol):
    """A queue of device work. Devices without queues use :class:`hpcompat.core.comm_ctx.NullStream`."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...


class Streams(Protocol):
    """The streams of one device."""

    @property
    def available(self) -> bool:
        """False where collectives either block the caller or complete through ``wait()`` (CPU)."""
        ...

    def current(self) -> Stream: ...
    def create(self, *, high_priority: bool) -> Stream: ...


# Collectives in flight


class Gather(Protocol):
    """An all-gather in flight: its buffer, the event that ends it (streams) or its work object (no streams)."""

    event: Any
    is_async: bool

    def wait(self) -> None:
        """Block until the buffer is complete, on the current stream or on the calling thread."""
        ...


class Reduction(Protocol):
    """A gradient reduction in flight. It carries its own policy (dtype, division, hook), never its drainer's."""

    post_stream: Any
    post_event: Any

    def complete(self) -> None:
        """Wait for the collective, divide, cast, and put the gradients on the shards. Idempotent."""
        ...

    def release_input(self) -> None:
        """Drop the reduction's input; with streams, only after the current stream is past the reduction."""
        ...

    def abandon(self) -> None:
        """Wait for what is in flight and drop the result."""
        ...


class GradientBucket(Protocol):
    """Gradients of one param group that are reduced in one collective: one reduce dtype, one original dtype."""

    @property
    def overflow_risk(self) -> bool:
        """Whether the reduce dtype is neither float32 nor bfloat16, so that the division is split around it."""
        ...


# The scheduler's side, as far as a backend uses it


class HookedUnit(Protocol):
    """The modules of one ``fully_shard`` call. A backend's hooks on them call these methods."""

    fqn: str

    @property
    def modules(self) -> tuple[Any, ...]: ...
    @property
    def groups(self) -> Sequence[HookedGroup]: ...
    @property
    def device(self) -> Any: ...
    @property
    def mp_policy(self) -> MixedPrecisionPolicy: ...
    @property
    def is_forward_root(self) -> bool:
        """Whether the running forward began with this unit."""
        ...

    def pre_forward(self, index: int = 0) -> ForwardEntry:
        """Before forward of member ``index`` of ``modules``."""
        ...

    def post_forward(self, index: int = 0, *, in_backward: bool, records: bool = True) -> Sequence[HookedUnit]:
        """After forward of member ``index``. ``records`` says whether there may be a backward.

        Returns the units whose pre-backward hook belongs on the output: this one, and those that it completes.
        """
        ...

    def pre_backward(self) -> None:
        """At a gradient of an output."""
        ...


class ForwardHooks(Protocol):
    """What happens around a forward. :class:`hpcompat.core.around.AroundForward` has the order of it."""

    def before(
        self, unit: Any, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the forward pre-hook of module ``index`` of ``unit`` does; gives what forward is called with."""
        ...

    def after(self, unit: Any, index: int, output: Any) -> Any:
        """What the forward post-hook does; gives what the module returns."""
        ...


class HookedGroup(Protocol):
    """The parameters of a unit that travel together. ``post_backward`` is called by a backend's hooks on the inputs."""

    fqn: str
    index: int
    num_groups: int
    training_state: TrainingState

    @property
    def tensors(self) -> GroupTensors:
        """What the backend's ``make_group`` returned."""
        ...

    @property
    def distributed(self) -> Distributed: ...
    def post_backward(self) -> None:
        """When the gradients of all inputs of the unit are there."""
        ...

    @property
    def is_in_use(self) -> bool:
        """Whether a forward or a backward of the group is computing with the whole parameters."""
        ...

    def to_sharded(self) -> None:
        """Before the parameters are looked at from outside, as in ``state_dict``. Not while the group is in use."""
        ...

    def to_sharded_for_loading(self) -> None:
        """Before new values come from outside.

        Raises:
            RuntimeError: the group is in use.
        """
        ...


class Pledge(Protocol):
    """What this rank has promised the others about one reduction."""

    def settle(self) -> None:
        """After the collective, before its result is used.

        Raises:
            RuntimeError: another rank has reduced other gradients.
        """
        ...


# Requests


@dataclass(frozen=True)
class DividePlan:
    """One path of a gradient: divide by ``pre``, reduce-scatter, all-reduce, divide by ``owed``, call the hook, divide
    by ``post``.

    ``None`` means no division. ``scatter_op`` and ``all_reduce_op`` are reductions that the group has; the argument of
    ``ReduceOp.PREMUL_SUM`` is ``premul``. ``owed`` is the division that a reduction would have done which it lacks: the
    hook gets the same on every group.
    """

    pre: float | None
    scatter_op: ReduceOp
    all_reduce_op: ReduceOp
    post: float | None
    premul: float | None = None
    owed: float | None = None


@dataclass(frozen=True)
class GatherRequest:
    """How to gather: over which group, on which streams, with which collective."""

    source: ShardedState
    group: Any
    world_size: int
    copy_in_stream: Any
    gather_stream: Any
    comm: AllGather | None
    async_op: bool
    # False while this rank catches up: the others have had its part already, and the output is zeros.
    takes_part: bool = True
    # Whose collective it is, for :func:`hpcompat.core.failure.failed`.
    owner: HookedGroup | None = None


@dataclass(frozen=True)
class ReduceRequest:
    """How to reduce one bucket. ``None`` groups do not take part; see :func:`hpcompat.core.divide.divide_plan`."""

    scatter_group: Any
    shard_world_size: int
    all_reduce_group: Any
    all_reduce: bool
    plan: DividePlan
    scale: Any
    comm: ReduceScatter | None
    hook: Callable[[Any], None] | None
    reduce_stream: Any
    all_reduce_stream: Any
    # As in GatherRequest.
    takes_part: bool = True
    # To be settled before the gradients are used. Waiting goes through hpcompat.core.agreement.
    pledge: Pledge | None = None
    owner: HookedGroup | None = None


# Tensors


class GroupTensors(Protocol):
    """The tensors of one param group in all their representations."""

    @property
    def names(self) -> list[str]:
        """Qualified parameter names; the wrap gives local ones, lazy init gives full ones."""
        ...

    @property
    def unsharded_bytes(self) -> int:
        """Size of the whole parameters, in the dtypes in which they are computed with."""
        ...

    def shard(self) -> None:
        """Shard the parameters and register the shards. Until then, making the group has changed nothing."""
        ...

    def bind_names(self, prefixes: dict[Any, str]) -> None:
        """Take the qualified prefix (``"layers.0."``, ``""`` for the root) of every module."""
        ...

    def prepare(self) -> None:
        """Before the first use: take up replaced parameters and fix the dtypes.

        Raises:
            RuntimeError: a parameter is on the meta device, or not on the CPU under CPU offload.
        """
        ...

    def all_gather(self, request: GatherRequest) -> Gather: ...
    def copy_out(self, gather: Gather) -> None:
        """Wait for ``gather`` and fill the unsharded parameters."""
        ...

    def to_unsharded(self) -> None: ...
    def to_sharded(self) -> None: ...
    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> None: ...

    def has_new_gradients(self) -> bool:
        """Whether autograd has left gradients since they were last taken, stashed or accumulated."""
        ...

    def watch_gradients(self, note: Callable[[], None]) -> None:
        """From now on call ``note`` whenever autograd gives one of the whole parameters a gradient. Asked for often."""
        ...

    def accumulate_gradients(self) -> None:
        """Add new gradients to those kept from earlier backwards, where there are any."""
        ...

    def stash_gradients(self) -> None:
        """With sync off: keep gradients in the reduce dtype, apart from the unsharded parameter."""
        ...

    def take_gradients(self, *, fill_unused: bool) -> list[Any]:
        """Hand over every gradient that exists (zeros for unused parameters if asked) as buckets."""
        ...

    def missing_gradients(self, buckets: Sequence[Any]) -> tuple[str, ...]:
        """Names of the trainable parameters that are in none of ``buckets``, in registration order."""
        ...

    def zero_gradients(self, missing: Collection[str]) -> list[Any]:
        """Buckets of zeros for all trainable parameters but the ``missing`` ones."""
        ...

    def drop_gradients(self) -> None:
        """Forget unsharded, accumulated and partially reduced gradients."""
        ...

    def start_reduce(self, bucket: Any, request: ReduceRequest) -> Reduction: ...
    def wait_for_offload(self) -> None:
        """Block until gradients on their way to the CPU have arrived."""
        ...


# Ranks


class Notes(Protocol):
    """What some ranks leave for one another, outside of their collectives."""

    # Kept by the scheduler, from 0: comm contexts that use these notes, and how often they went unanswered.
    num_contexts: int
    num_unanswered: int

    @property
    def rank(self) -> int:
        """This one; like all ranks here a global one."""
        ...

    @property
    def others(self) -> Sequence[int]: ...
    def leave(self, key: str, note: str) -> None:
        """Let the others read ``note`` under ``key``; replaces an earlier one."""
        ...

    def find(self, key: str, rank: int) -> str | None:
        """What ``rank`` has left, or ``None`` if nothing yet. Does not wait."""
        ...
