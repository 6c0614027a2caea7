"""Small modules and meshes to make mistakes with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor


def linear(rows: int = 4) -> nn.Linear:
    return nn.Linear(4, rows)


@functools.cache
def mesh(*sizes: int, names: str | None = None) -> DeviceMesh:
    """A CPU mesh; ``names`` are separated by spaces. Made once: of equal meshes DTensor remembers the first."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()) if names else None)


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    """A module whose only parameter is called ``table``."""
    module = nn.Module()
    module.table = nn.Parameter(parameter)
    return module


def with_distributed_parameters(device_mesh: DeviceMesh, placements: Any = None) -> nn.Linear:
    """A linear layer whose parameters are DTensors on ``device_mesh``, replicated or as ``placements`` says."""
    module = linear()
    placements = placements or [Replicate()] * device_mesh.ndim
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), device_mesh, placements)))
    return module


def stack(num_layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(linear() for _ in range(num_layers)))


def batch() -> torch.Tensor:
    return torch.ones(2, 4)


def wrapped(api: Any, **options: Any) -> Any:
    """One wrapped linear layer."""
    return api.fully_shard(linear(), **options)


def wrapped_stack(api: Any, **options: Any) -> Any:
    """Two wrapped layers in a wrapped root."""
    model = stack()
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)
