"""The torch backend as the scheduler sees it: every method is a line or two into the room that knows how."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.contract.backend import WrapSpec
from hpcompat.contract.scheduler import GroupTensors, HookedUnit, Notes, Streams
from hpcompat.errors import CapabilityError
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo
from hpcompat.module import HSDPModule
from hpcompat.policy import OffloadPolicy
from hpcompat_torch import (
    checkpoint,
    collectives,
    distributed,
    hooks,
    mesh,
    native_view,
    notes,
    optim,
    private,
    training,
    transport,
)
from hpcompat_torch.group import GroupTensors as TorchGroupTensors
from hpcompat_torch.native_view import NativeModule
from hpcompat_torch.param import managed_name
from hpcompat_torch.streams import streams_of


class TorchBackend:
    """Implements :class:`hpcompat.contract.backend.Backend`."""

    name = "torch"
    module_mixin = hooks.TorchModuleMixin
    replicate_mixin = hooks.TorchReplicateMixin
    distributed = distributed
    training = training
    checkpoint = checkpoint
    optim = optim
    around_forward = hooks.AROUND

    def owns(self, value: object) -> bool:
        return isinstance(value, nn.Module | torch.Tensor | DeviceMesh | torch.optim.Optimizer)

    def is_module(self, value: object) -> bool:
        return isinstance(value, nn.Module)

    def probe(self) -> dict[str, object]:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        devices = ["cpu"]
        if accelerator is not None:
            devices += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
        return {
            "versions": {"torch": torch.__version__},
            "devices": devices,
            "capabilities": {
                "streams": accelerator is not None,
                "backends": [name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name)],
                "gloo reductions": transport.described("gloo", device_type="cpu"),
                "nccl reductions": transport.described("nccl", device_type="cuda"),
                "mesh concatenation (dp_mesh_dims, tensor parallel)": hasattr(DeviceMesh, "_concatenate"),
                "pinned CPU offload": accelerator is not None,
                "symmetric memory": False,
                "process-group allocation": accelerator is not None,
                "machine": platform.machine(),
            },
        }

    # Modules

    def named_modules(self, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return module.named_modules()

    def children(self, module: nn.Module) -> Iterable[nn.Module]:
        return module.children()

    def named_parameters(self, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
        return module.named_parameters(recurse=recurse, remove_duplicate=False)

    def buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        return module.buffers(recurse=False)

    def is_bare_container(self, module: nn.Module) -> bool:
        return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward

    def is_parameter(self, value: object) -> bool:
        return isinstance(value, nn.Parameter)

    def managed_name(self, parameter: torch.Tensor) -> str | None:
        return managed_name(parameter)

    def is_scalar(self, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 0

    # Meshes

    def default_mesh(self, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return mesh.default_mesh(names)

    def is_mesh(self, value: object) -> bool:
        return isinstance(value, DeviceMesh)

    def device_of(self, device_mesh: DeviceMesh) -> torch.device:
        return mesh.device_of(device_mesh)

    def submesh(self, device_mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
        return mesh.submesh(device_mesh, dims)

    def flatten(self, device_mesh: DeviceMesh) -> DeviceMesh:
        return mesh.flatten(device_mesh)

    def post_forward_mesh(self, mesh_info: FSDPMeshInfo, size: int) -> DeviceMesh:
        return mesh.post_forward_mesh(mesh_info, size)

    def separate_group(self, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        timeout = distributed.timeout_of_groups()
        return dist.new_group(
            ranks, timeout=timeout, use_local_synchronization=True, group_desc="hpcompat_reduce_scatter"
        )

    def notes(self, mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> Notes | None:
        return notes.notes_of(mesh.ranks_of(mesh_info, with_replicas=with_replicas))

    def supported_reductions(self, group: Any, *, collective: str, device: torch.device) -> frozenset[ReduceOp]:
        return transport.supported_reductions(group, collective=collective, device=device)

    def comm_for(self, kind: str, group: Any) -> tuple[AllGather, ReduceScatter]:
        return collectives.comm_for(kind, group)

    # Wrapping

    def streams(self, device: torch.device) -> Streams:
        return streams_of(device)

    def is_dtype(self, value: object) -> bool:
        return isinstance(value, torch.dtype)

    def is_floating(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def check_offload(self, offload_policy: OffloadPolicy, device: torch.device) -> None:
        if getattr(offload_policy, "pin_memory", False) and not torch.accelerator.is_available():
            raise CapabilityError(
                backend=self.name,
                capability="pinned memory",
                hint=f"no accelerator here, but got {offload_policy}; pass CPUOffloadPolicy(pin_memory=False)",
            )

    def place(self, parameters: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if tensor.device == device or tensor.is_meta:
                continue
            if isinstance(tensor, DTensor):
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh, but got "
                    f"{tensor.device_mesh.device_type} for a DTensor and {device.type} for FSDP"
                )
            if private.is_traceable_wrapper_subclass(tensor):
                with torch.no_grad():
                    moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)
            else:
                tensor.data = tensor.to(device)

    def make_group(self, spec: WrapSpec) -> GroupTensors:
        _refuse_native_units(spec.modules)
        optim.watch_for_stale_parameters()
        return TorchGroupTensors(spec)

    def buffers_on_meta(self, module: nn.Module) -> list[str]:
        return [name for name, buffer in module.named_buffers() if buffer.is_meta]

    # Autograd

    def install_hooks(self, unit: HookedUnit) -> None:
        hooks.install(unit)
        native_view.register(unit, is_replicated=unit.label == "Replicate")

    def queue_final_callback(self, callback: Callable[[], None]) -> None:
        hooks.queue_final_callback(callback)


def _refuse_native_units(modules: Sequence[nn.Module]) -> None:
    """A unit of torch's own FSDP2 below ours would be sharded twice."""
    for root in modules:
        for module in root.modules():
            if isinstance(module, NativeModule) and not isinstance(module, HSDPModule):
                raise ValueError(
                    f"expected only units of hpcompat below {type(root).__name__}, but got {type(module).__name__}, "
                    "which torch.distributed.fsdp has wrapped; import fully_shard from hpcompat everywhere"
                )
