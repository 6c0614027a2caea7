"""All that a backend implements. The scheduler decides when; a backend owns every tensor and never decides.

The seam is a param group wide, not a parameter wide: one call moves, registers or reduces everything that travels in
one collective, so that the cost of the seam does not grow with the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.core.divide import DividePlan
from hpcompat.core.states import ShardedState
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo

if TYPE_CHECKING:
    from hpcompat.core.agreement import Notes, Pledge
    from hpcompat.core.around import AroundForward
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit
    from hpcompat.distributed import Distributed
    from hpcompat.optim import Optim
    from hpcompat.policy import MixedPrecisionPolicy, OffloadPolicy
    from hpcompat.record import Checkpoint
    from hpcompat.training import Training


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
    owner: ParamGroup | None = None


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
    owner: ParamGroup | None = None


class GroupTensors(Protocol):
    """The tensors of one param group in all their representations."""

    @property
    def uids(self) -> Sequence[int]:
        """A process-wide number per original parameter, in registration order."""
        ...

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


class WrapSpec(NamedTuple):
    """What one param group is made of, from :mod:`hpcompat.core.wrap` to ``Backend.make_group``."""

    parameters: list[Any]
    modules: tuple[Any, ...]
    mesh_info: DataParallelMeshInfo
    post_forward_mesh_info: FSDPMeshInfo | None
    device: Any
    placements: list[Any]
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    fuse: bool
    zero_copy: bool


class Backend(Protocol):
    """One framework. Found by the entry point group ``hpcompat.backends``."""

    name: str
    # What comes between HSDPModule, or ReplicateModule, and the user's class.
    module_mixin: type
    replicate_mixin: type

    # Rooms that the scheduler does not enter: the backend's modules of the same names.
    distributed: Distributed
    training: Training
    checkpoint: Checkpoint
    optim: Optim
    around_forward: AroundForward

    def owns(self, value: object) -> bool:
        """Whether ``value`` is a module, a tensor, a mesh or an optimizer of the framework."""
        ...

    def is_module(self, value: object) -> bool: ...
    def probe(self) -> dict[str, object]: ...

    def named_modules(self, module: Any) -> Iterable[tuple[str, Any]]: ...
    def children(self, module: Any) -> Iterable[Any]: ...
    def named_parameters(self, module: Any, *, recurse: bool) -> Iterator[tuple[str, Any]]:
        """Every place of every parameter, shared ones included."""
        ...

    def buffers(self, module: Any) -> Iterable[Any]: ...
    def is_bare_container(self, module: Any) -> bool:
        """A list or dict of modules without a forward of its own."""
        ...

    def parameter_uid(self, parameter: Any) -> int:
        """A process-wide number that survives the parameter's replacement; stamped, never ``id()``."""
        ...

    def is_parameter(self, value: object) -> bool: ...
    def is_scalar(self, parameter: Any) -> bool: ...

    def default_mesh(self, names: tuple[str, ...] | None = None) -> Any: ...
    def is_mesh(self, value: object) -> bool: ...
    def device_of(self, mesh: Any) -> Any: ...
    def submesh(self, mesh: Any, dims: DataParallelMeshDims) -> Any:
        """The data-parallel mesh that ``dims`` picks from ``mesh``: [replicate,] [shard], each flattened to one
        axis.
        """
        ...

    def flatten(self, mesh: Any) -> Any:
        """All axes of ``mesh`` as one."""
        ...

    def post_forward_mesh(self, mesh_info: FSDPMeshInfo, size: int) -> Any: ...
    def separate_group(self, group: Any) -> Any:
        """A new process group over the ranks of ``group``. Collective over them."""
        ...

    def notes(self, mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> Notes | None:
        """The notes of all ranks of the mesh, or of those of this rank's replica; always the same object for the same
        ranks, and ``None`` where there is no other rank or no way to leave notes.
        """
        ...

    def supported_reductions(self, group: Any) -> frozenset[ReduceOp]: ...
    def comm_for(self, kind: str, group: Any) -> tuple[AllGather, ReduceScatter]:
        """Communication objects whose buffers come from ``kind``: ``"process_group"`` or ``"symm_mem"``.

        Raises:
            CapabilityError: the device has no such memory.
        """
        ...

    def streams(self, device: Any) -> Streams: ...
    def place(self, parameters: Sequence[Any], buffers: Sequence[Any], device: Any) -> None:
        """Move original parameters and buffers to ``device``, in place; meta tensors stay."""
        ...

    def check_policies(self, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy, device: Any) -> None: ...
    def make_group(self, spec: WrapSpec) -> GroupTensors: ...
    def check_ready(self, module: Any) -> None:
        """Before the first forward of a root.

        Raises:
            RuntimeError: a buffer at or below ``module`` is on the meta device.
        """
        ...

    def install_hooks(self, unit: Unit) -> None: ...
    def queue_final_callback(self, callback: Callable[[], None]) -> None: ...
