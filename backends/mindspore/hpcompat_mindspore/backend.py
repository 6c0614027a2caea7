"""The MindSpore backend as the scheduler sees it: every method is a line or two into the room that knows how."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.contract.backend import WrapSpec
from hpcompat.contract.scheduler import GroupTensors, HookedUnit, Notes, Streams
from hpcompat.errors import CapabilityError
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo
from hpcompat.policy import OffloadPolicy
from hpcompat_mindspore import (
    autograd,
    checkpoint,
    collectives,
    distributed,
    hooks,
    mesh,
    notes,
    optim,
    probe,
    training,
)
from hpcompat_mindspore.communicator import Communicator
from hpcompat_mindspore.group import GroupTensors as MindSporeGroupTensors
from hpcompat_mindspore.param import managed_name
from hpcompat_mindspore.streams import streams_of
from hpcompat_mindspore.tensors import is_floating

# Statistics that a forward writes and no optimizer trains: parameters in MindSpore, buffers elsewhere.
_STATISTICS = frozenset({"moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"})


class MindSporeBackend:
    """Implements :class:`hpcompat.contract.backend.Backend`."""

    name = "mindspore"
    module_mixin = replicate_mixin = hooks.MindSporeModuleMixin
    distributed = distributed
    training = training
    checkpoint = checkpoint
    optim = optim
    around_forward = hooks.AROUND

    def owns(self, value: object) -> bool:
        return isinstance(value, nn.Cell | Tensor | mesh.DeviceMesh) or optim.is_optimizer(value)

    def is_module(self, value: object) -> bool:
        return isinstance(value, nn.Cell)

    def probe(self) -> dict[str, object]:
        missing = probe.missing_names()
        return {
            "versions": {"mindspore": mindspore.__version__, "numpy": np.__version__},
            "devices": [mindspore.get_context("device_target")],
            "capabilities": {
                "streams": False,
                "MPI (CPU)": importlib.util.find_spec("mpi4py") is not None,
                "reductions (CPU)": ["avg", "sum"],
                "reductions (Ascend)": ["sum"],
                "private names that are missing": missing,
                "behaviours": {} if missing else probe.behaviours(),
                "pinned CPU offload": False,
                "symmetric memory": False,
                "graph mode": False,
            },
        }

    # Modules

    def named_modules(self, module: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
        return module.cells_and_names()  # type: ignore[no-any-return]

    def children(self, module: nn.Cell) -> Iterable[nn.Cell]:
        return (child for child in module.cells() if child is not None)

    def named_parameters(self, module: nn.Cell, *, recurse: bool) -> Iterator[tuple[str, Parameter]]:
        for prefix, cell in module.cells_and_names() if recurse else [("", module)]:
            for name, parameter in cell._params.items():
                if parameter is not None and not _is_statistic(name, parameter):
                    yield f"{prefix}.{name}" if prefix else name, parameter

    def buffers(self, module: nn.Cell) -> Iterable[Tensor]:
        yield from module.buffers(recurse=False)
        for name, parameter in module._params.items():
            if parameter is not None and _is_statistic(name, parameter):
                yield parameter

    def is_bare_container(self, module: nn.Cell) -> bool:
        containers = tuple(getattr(nn, name) for name in ("CellList", "CellDict") if hasattr(nn, name))
        own = {container.construct for container in containers}
        return isinstance(module, containers) and type(module).construct in own

    def is_parameter(self, value: object) -> bool:
        return isinstance(value, Parameter)

    def managed_name(self, parameter: Parameter) -> str | None:
        return managed_name(parameter)

    def is_scalar(self, parameter: Parameter) -> bool:
        return parameter.ndim == 0  # type: ignore[no-any-return]

    # Meshes

    def default_mesh(self, names: tuple[str, ...] | None = None) -> mesh.DeviceMesh:
        return mesh.default_mesh(names)

    def is_mesh(self, value: object) -> bool:
        return isinstance(value, mesh.DeviceMesh)

    def device_of(self, device_mesh: mesh.DeviceMesh) -> str:
        return mesh.device_of(device_mesh)

    def submesh(self, device_mesh: mesh.DeviceMesh, dims: DataParallelMeshDims) -> mesh.DeviceMesh:
        return mesh.submesh(device_mesh, dims)

    def flatten(self, device_mesh: mesh.DeviceMesh) -> mesh.DeviceMesh:
        return mesh.flatten(device_mesh)

    def post_forward_mesh(self, mesh_info: FSDPMeshInfo, size: int) -> mesh.DeviceMesh:
        return mesh.post_forward_mesh(mesh_info, size)

    def separate_group(self, group: Communicator) -> Communicator:
        return group.separate()

    def notes(self, mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> Notes | None:
        return notes.notes_of(mesh.ranks_of(mesh_info, with_replicas=with_replicas))

    def supported_reductions(self, group: Communicator, *, collective: str, device: str) -> frozenset[ReduceOp]:
        return group.reductions

    def comm_for(self, kind: str, group: Communicator) -> tuple[AllGather, ReduceScatter]:
        return collectives.comm_for(kind, group)

    # Wrapping

    def streams(self, device: str) -> Streams:
        return streams_of(device)

    def is_dtype(self, value: object) -> bool:
        return isinstance(value, mindspore.Type)

    def is_floating(self, dtype: mindspore.Type) -> bool:
        return is_floating(dtype)

    def check_offload(self, offload_policy: OffloadPolicy, device: str) -> None:
        if getattr(offload_policy, "pin_memory", False):
            raise CapabilityError(
                backend=self.name,
                capability="pinned memory",
                hint=f"MindSpore has none, but got {offload_policy}; pass CPUOffloadPolicy(pin_memory=False)",
            )
        if hasattr(offload_policy, "pin_memory") and device != "CPU":
            raise CapabilityError(
                backend=self.name, capability=f"CPU offload on {device}", hint="leave offload_policy out"
            )

    def place(self, parameters: Sequence[Parameter], buffers: Sequence[Tensor], device: str) -> None:
        """Run initializers that have not run yet. MindSpore itself moves data to the device that computes."""
        for parameter in parameters:
            if parameter.has_init and not parameter.is_meta:
                parameter.init_data()

    def make_group(self, spec: WrapSpec) -> GroupTensors:
        probe.require()
        return MindSporeGroupTensors(spec)

    def buffers_on_meta(self, module: nn.Cell) -> list[str]:
        return [name for name, buffer in module.named_buffers() if buffer.is_meta]

    # Autograd

    def install_hooks(self, unit: HookedUnit) -> None:
        hooks.install(unit)

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        autograd.queue_final_callback(callback)


def _is_statistic(name: str, parameter: Parameter) -> bool:
    return name in _STATISTICS and not parameter.requires_grad
