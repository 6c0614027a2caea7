"""All that a backend implements. The scheduler decides when; a backend owns every tensor and never decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.contract.checkpoint import Checkpoint
from hpcompat.contract.distributed import Distributed
from hpcompat.contract.optimizer import Optim
from hpcompat.contract.scheduler import ForwardHooks, GroupTensors, HookedUnit, Notes, Streams
from hpcompat.contract.training import Training
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo
from hpcompat.policy import MixedPrecisionPolicy, OffloadPolicy


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
    # What its hooks on modules call; also called around methods other than forward.
    around_forward: ForwardHooks

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

    def is_parameter(self, value: object) -> bool: ...
    def managed_name(self, parameter: Any) -> str | None:
        """``"Linear.weight"`` of what shards ``parameter`` already, or one that was the same object before."""
        ...

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

    def supported_reductions(self, group: Any, *, collective: str, device: Any) -> frozenset[ReduceOp]:
        """The reductions that ``collective``, ``"reduce_scatter"`` or ``"all_reduce"``, is known to compute over
        ``group`` on ``device``.
        """
        ...

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

    def is_dtype(self, value: object) -> bool: ...
    def is_floating(self, dtype: Any) -> bool: ...
    def check_offload(self, offload_policy: OffloadPolicy, device: Any) -> None:
        """
        Raises:
            CapabilityError: nothing can be kept there, or not in pinned memory.
        """
        ...

    def make_group(self, spec: WrapSpec) -> GroupTensors: ...
    def buffers_on_meta(self, module: Any) -> list[str]:
        """Names of the buffers at and below ``module`` that are on the meta device."""
        ...

    def install_hooks(self, unit: HookedUnit) -> None: ...
    def queue_final_callback(self, callback: Callable[[], None]) -> None: ...
