"""Models whose parameters are DTensors before they are sharded: tensor parallel, and on a full SPMD mesh."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parity.models import WIDTH, Block, FullyShard, ModelCase, make_mlp, seeded, squared_error, vectors, wrap_blocks

NUM_TENSOR_RANKS = 2
"""Size of the last mesh axis of these models; ranks along it see the same data."""


def same_data_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tensor-parallel ranks share their batch."""
    return vectors(WIDTH, 5)(rank // NUM_TENSOR_RANKS, step)


def wrap_tensor_parallel(module: nn.Module, fully_shard: FullyShard, *, mesh: DeviceMesh, **kwargs: Any) -> None:
    """Column- and row-parallel linear layers over the last mesh axis, then units over the others."""
    names = mesh.mesh_dim_names or ()
    for block in module.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh[names[-1]], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(module, mesh[names[-1]], {"2": ColwiseParallel(output_layouts=Replicate())})
    wrap_blocks(module, fully_shard, mesh=mesh[names[:-1]] if len(names) > 2 else mesh[names[0]], **kwargs)


def wrap_spmd(module: nn.Module, fully_shard: FullyShard, *, mesh: DeviceMesh, **kwargs: Any) -> None:
    """Every parameter a DTensor on the whole mesh, replicated over its data-parallel axes; `dp_mesh_dims` in kwargs."""
    data_axes = [Replicate()] * (mesh.ndim - 1)
    for path, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            last = Shard(0) if path.endswith("up") else Replicate()
            value = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [*data_axes, last]))
            owner.register_parameter(name, value)
    module.mesh = mesh
    wrap_blocks(module, fully_shard, mesh=mesh, **kwargs)


def spmd_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Inputs are sharded by batch over the data axes; the loss is the mean over all of them."""
    mesh: DeviceMesh = module.mesh
    placements = [*[Shard(0)] * (mesh.ndim - 1), Replicate()]
    inputs, targets = (DTensor.from_local(part, mesh, placements, run_check=False) for part in batch)
    return F.mse_loss(module(inputs).float(), targets).full_tensor()


TENSOR_PARALLEL: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("tp", seeded(make_mlp), wrap_tensor_parallel, same_data_batch, squared_error),
        ModelCase("spmd", seeded(make_mlp), wrap_spmd, same_data_batch, spmd_loss),
    )
}
