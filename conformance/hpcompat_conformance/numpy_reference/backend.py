"""The reference as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.contract.scheduler import Notes
from hpcompat.core.comm_ctx import NullStreams
from hpcompat.errors import CapabilityError
from hpcompat_conformance.numpy_reference import collectives, hooks, tape
from hpcompat_conformance.numpy_reference.group import GroupTensors
from hpcompat_conformance.numpy_reference.mesh import DeviceMesh, init_device_mesh, ranks_of, submesh
from hpcompat_conformance.numpy_reference.module import Buffer, Module, Parameter
from hpcompat_conformance.numpy_reference.param import managed_name
from hpcompat_conformance.numpy_reference.world import Group, current_rank, notes_of

if TYPE_CHECKING:
    from hpcompat.contract.backend import WrapSpec
    from hpcompat.contract.scheduler import Streams
    from hpcompat.core.unit import Unit
    from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo
    from hpcompat.policy import OffloadPolicy


class ModuleMixin:
    """What wrapped modules do differently from others: here nothing."""


class Ranks:
    """Of :class:`hpcompat.contract.distributed.Distributed` what may be asked about a model that exists."""

    def get_rank(self, group: Group | None) -> int:
        return current_rank().number if group is None else group.index

    def get_world_size(self, group: Group | None) -> int:
        return current_rank().world.size if group is None else group.size


class NumpyBackend:
    """Implements :class:`hpcompat.contract.backend.Backend`. ``device_streams`` stand in for an accelerator's."""

    name = "numpy"
    module_mixin = replicate_mixin = ModuleMixin
    around_forward = hooks.AROUND
    distributed = Ranks()

    def __init__(self, device_streams: Streams | None = None) -> None:
        self.device_streams: Streams = device_streams or NullStreams()

    def owns(self, value: object) -> bool:
        return isinstance(value, Module)

    def is_module(self, value: object) -> bool:
        return isinstance(value, Module)

    def probe(self) -> dict[str, object]:
        return {"versions": {"numpy": np.__version__}, "devices": ["numpy"], "capabilities": {}}

    # Modules

    def named_modules(self, module: Module) -> Iterable[tuple[str, Module]]:
        return module.named_modules()

    def children(self, module: Module) -> Iterable[Module]:
        return (child for _, child in module.members(Module))

    def named_parameters(self, module: Module, *, recurse: bool) -> Iterator[tuple[str, Parameter]]:
        return module.named_parameters(recurse=recurse)

    def buffers(self, module: Module) -> Iterable[Buffer]:
        return (buffer for _, buffer in module.members(Buffer))

    def is_bare_container(self, module: Module) -> bool:
        return type(module).forward is Module.forward

    def is_parameter(self, value: object) -> bool:
        return isinstance(value, Parameter)

    def managed_name(self, parameter: Parameter) -> str | None:
        return managed_name(parameter)

    def is_scalar(self, parameter: Parameter) -> bool:
        return parameter.data.ndim == 0

    # Meshes

    def default_mesh(self, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return init_device_mesh((-1,), mesh_dim_names=names)

    def is_mesh(self, value: object) -> bool:
        return isinstance(value, DeviceMesh)

    def device_of(self, mesh: DeviceMesh) -> str:
        return "numpy"

    def submesh(self, mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
        return submesh(mesh, dims)

    def flatten(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh._flatten("_".join(mesh.mesh_dim_names or ()))

    def post_forward_mesh(self, mesh_info: FSDPMeshInfo, size: int) -> DeviceMesh:
        return DeviceMesh(mesh_info.mesh.ranks.reshape(-1, size), None, mesh_info.mesh.rank)

    def separate_group(self, group: Group) -> Group:
        return Group(group.ranks, group.rank, label="separate")

    def notes(self, mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> Notes | None:
        return notes_of(ranks_of(mesh_info, with_replicas=with_replicas), mesh_info.mesh.rank)

    def supported_reductions(self, group: Group, *, collective: str, device: str) -> frozenset[ReduceOp]:
        return group.rank.world.reductions

    def comm_for(self, kind: str, group: Group) -> tuple[AllGather, ReduceScatter]:
        if kind != "process_group":
            raise CapabilityError(backend=self.name, capability=kind, hint="all memory here is numpy's; drop the call")
        return collectives.AllGather(), collectives.ReduceScatter()

    # Wrapping

    def streams(self, device: str) -> Streams:
        return self.device_streams

    def place(self, parameters: Sequence[Parameter], buffers: Sequence[Buffer], device: str) -> None:
        """There is one device, and everything is on it."""

    def is_dtype(self, value: object) -> bool:
        return isinstance(value, np.dtype | type)

    def is_floating(self, dtype: Any) -> bool:
        return bool(np.issubdtype(dtype, np.floating))

    def check_offload(self, offload_policy: OffloadPolicy, device: str) -> None:
        if getattr(offload_policy, "pin_memory", False):
            raise CapabilityError(backend=self.name, capability="pinned memory", hint="pass pin_memory=False")

    def make_group(self, spec: WrapSpec) -> GroupTensors:
        return GroupTensors(spec, streams=self.device_streams)

    def buffers_on_meta(self, module: Module) -> list[str]:
        """No array is ever without data here."""
        return []

    # Autograd

    def install_hooks(self, unit: Unit) -> None:
        hooks.install(unit)

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        tape.queue_callback(callback)
