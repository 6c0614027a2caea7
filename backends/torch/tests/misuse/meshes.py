"""Meshes that cannot be read without guessing."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpcompat import DDPMeshInfo, FSDPMeshInfo, UserError
from misuse.models import batch, linear, mesh, with_distributed_parameters
from misuse.row import Misuse


def _names(axes: str) -> Any:
    """Wrap over a 2-D mesh with these axes."""
    return lambda api: api.fully_shard(linear(), mesh=mesh(1, 1, names=axes))


def _dims(*, axes: str | None = "dp tp", **dims: Any) -> Any:
    """Wrap a module of plain parameters with these ``dp_mesh_dims`` on a 2-D mesh."""
    return lambda api: api.fully_shard(
        linear(), mesh=mesh(1, 1, names=axes), dp_mesh_dims=api.DataParallelMeshDims(**dims)
    )


def _parameters_on_another_mesh(api: Any) -> None:
    module = with_distributed_parameters(mesh(1, 1, names="dp ep"))
    api.fully_shard(module, mesh=mesh(1, 1, names="dp tp"), dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))


def _parameters_sharded_on_a_data_parallel_axis(api: Any) -> None:
    device_mesh = mesh(1, 1, names="dp tp")
    module = with_distributed_parameters(device_mesh, [Shard(0), Replicate()])
    api.fully_shard(module, mesh=device_mesh, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))


def _int_reshard(api: Any) -> None:
    device_mesh = mesh(2, 1, names="dp tp")
    module = with_distributed_parameters(device_mesh)
    dims = api.DataParallelMeshDims(shard="dp")
    api.fully_shard(module, mesh=device_mesh, dp_mesh_dims=dims, reshard_after_forward=2)


def _int_reshard_with_tensor_parallel(api: Any) -> None:
    device_mesh = mesh(4, 1, names="dp tp")
    module = with_distributed_parameters(device_mesh["tp"])
    inputs = distribute_tensor(batch(), device_mesh["tp"], [Replicate()])
    api.fully_shard(module, mesh=device_mesh["dp"], reshard_after_forward=2)(inputs)


def _replicate_only(api: Any, **options: Any) -> Any:
    device_mesh = mesh(1, 1, names="dp tp")
    dims = api.DataParallelMeshDims(replicate="dp")
    return api.fully_shard(with_distributed_parameters(device_mesh), mesh=device_mesh, dp_mesh_dims=dims, **options)


AMBIGUOUS = r"expected a 2D mesh whose axis 0 replicates and whose axis 1 shards, but got axes {axes}: {culprit} "
EITHER = (ValueError, AssertionError, UserError)

ROWS = [
    Misuse(
        "mesh-process-group",
        lambda api: api.fully_shard(linear(), mesh=dist.group.WORLD),
        (TypeError,),
        r"expected mesh to be a DeviceMesh, but got <.*ProcessGroup",
        r"init_device_mesh",
    ),
    Misuse(
        "mesh-3d",
        lambda api: api.fully_shard(linear(), mesh=mesh(1, 1, 1, names="pp dp tp")),
        (ValueError,),
        r"expects a 1D or 2D DeviceMesh but got DeviceMesh.*pp=1, dp=1, tp=1",
        r"pass dp_mesh_dims to pick",
        "ENT-09",
        native=ValueError,
    ),
    Misuse(
        "mesh-2d-unnamed",
        _names(""),
        EITHER,
        r"Please init the 2D mesh for HSDP with mesh_dim_names specified.*but got .*DeviceMesh\(\(1, 1\)",
        r'mesh_dim_names=\("dp_replicate", "dp_shard"\)',
        "ENT-09",
        native=AssertionError,
    ),
    Misuse(
        "mesh-2d-dp-shard-cp",
        _names("dp_shard cp"),
        (ValueError,),
        AMBIGUOUS.format(axes=r"\('dp_shard', 'cp'\)", culprit="'cp'"),
        r"_flatten\('dp_shard_cp'\).*dp_mesh_dims",
        "ENT-10",
    ),
    Misuse(
        "mesh-2d-tp-dp",
        _names("tp dp"),
        (ValueError,),
        AMBIGUOUS.format(axes=r"\('tp', 'dp'\)", culprit="'tp'"),
        r"_flatten\('tp_dp'\).*dp_mesh_dims",
        "ENT-10",
    ),
    Misuse(
        "mesh-2d-dp-EP",
        _names("dp EP"),
        (ValueError,),
        AMBIGUOUS.format(axes=r"\('dp', 'EP'\)", culprit="'EP'"),
        r"_flatten\('dp_EP'\).*dp_mesh_dims",
        "ENT-10",
    ),
    Misuse(
        "mesh-2d-shard-first",
        _names("shard replicate"),
        (ValueError,),
        AMBIGUOUS.format(axes=r"\('shard', 'replicate'\)", culprit="'shard'"),
        r"_flatten\('shard_replicate'\).*dp_mesh_dims",
        "ENT-10",
    ),
    Misuse(
        "dims-unnamed-mesh",
        _dims(axes=None, shard="dp"),
        (ValueError,),
        r"mesh must have mesh_dim_names when dp_mesh_dims is provided, but got an unnamed mesh",
        r"pass mesh_dim_names to init_device_mesh",
        native=ValueError,
    ),
    Misuse(
        "dims-axis-twice",
        _dims(shard="dp", replicate="dp"),
        (ValueError,),
        r"dp_mesh_dims, but got DataParallelMeshDims\(shard='dp', replicate='dp'\)",
        r"expected every mesh axis once",
    ),
    Misuse(
        "dims-parameters-on-another-mesh",
        _parameters_on_another_mesh,
        (ValueError,),
        r"to be the same mesh passed to fully_shard, but got .*dp=1, ep=1.* for 'weight' instead of .*dp=1, tp=1",
        r"distribute the parameters on",
        native=ValueError,
    ),
    Misuse(
        "dims-parameters-sharded-on-dp",
        _parameters_sharded_on_a_data_parallel_axis,
        (ValueError,),
        r"Expected Replicate\(\) on DP shard dim 'dp' of parameter 'weight', but got S\(0\)",
        r"leave it whole there: fully_shard shards it",
        native=ValueError,
    ),
    Misuse(
        "dims-int-reshard",
        _int_reshard,
        (NotImplementedError,),
        r"reshard_after_forward as int is not yet supported with SPMD mesh \(dp_mesh_dims\), but got 2",
        r"pass a bool",
        native=NotImplementedError,
        world_size=2,
    ),
    Misuse(
        "int-reshard-with-tensor-parallel",
        _int_reshard_with_tensor_parallel,
        (NotImplementedError,),
        r"not supported for DTensor parameters yet.*but got 'weight'",
        r"use a bool",
        native=NotImplementedError,
        world_size=4,
    ),
    Misuse(
        "three-model-parallel-axes",
        lambda api: api.fully_shard(with_distributed_parameters(mesh(1, 1, 1, names="pp ep tp"))),
        (NotImplementedError,),
        r"only supports 1D TP/EP or 2D EP\+TP, but got parameter 'weight' with placements \(Replicate",
        r"dp_mesh_dims",
    ),
    Misuse(
        "placement-fn-without-shard-axis",
        lambda api: _replicate_only(api, shard_placement_fn=lambda parameter: None),
        (ValueError,),
        r"shard_placement_fn is not supported with DDPMeshInfo.*but got",
        r"a mesh with a shard axis",
        native=ValueError,
    ),
    Misuse(
        "separate-group-without-shard-axis",
        lambda api: _replicate_only(api).set_separate_reduce_scatter_group(),
        EITHER,
        r"Expected mesh_info to be FSDPMeshInfo, but got DDPMeshInfo",
        r"leave the call out",
        native=AssertionError,
    ),
    Misuse(
        "mesh-info-without-axis",
        lambda api: FSDPMeshInfo(mesh(1)),
        EITHER,
        r"expected shard_mesh_dim or replicate_mesh_dim, but got neither",
        r"name the axis",
    ),
    Misuse(
        "mesh-info-with-the-other-axis",
        lambda api: DDPMeshInfo(mesh(1), shard_mesh_dim=0),
        EITHER,
        r"expected replicate_mesh_dim to be an axis of the mesh, but got None",
        r"expected replicate_mesh_dim",
    ),
]
