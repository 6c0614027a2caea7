"""Device meshes of torch, and the DTensor specs that follow from a parameter, a mesh info and a placement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hpcompat.errors import CapabilityError
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from hpcompat_torch.distributed import device_type, with_timeout
from hpcompat_torch.private import DTensorSpec, StridedShard, TensorMeta


def default_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    """All ranks, on the accelerator if they talk over it; starts the default process group if nobody has."""
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=names)


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def flatten(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    return with_timeout(mesh._flatten("_".join(mesh.mesh_dim_names or ())))


def submesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """[replicate,] [shard]: each the named axes of ``mesh``, flattened into one if there are several."""
    parts = [_pick(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return parts[0] if len(parts) == 1 else concatenate(parts)


def _pick(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else with_timeout(mesh[names]._flatten("_".join(names)))


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    if not hasattr(DeviceMesh, "_concatenate"):
        raise CapabilityError(
            backend="torch",
            capability="mesh concatenation",
            hint=f"torch {torch.__version__} cannot join meshes; use 2.10 or newer",
        )
    return DeviceMesh._concatenate(meshes)


def post_forward_mesh(mesh_info: FSDPMeshInfo, size: int) -> DeviceMesh:
    """Groups of ``size`` consecutive ranks of the shard axis; under HSDP both axes are cut alike."""
    return with_timeout(DeviceMesh(mesh_info.mesh.device_type, mesh_info.mesh.mesh.view(-1, size)))


def ranks_of(mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> tuple[int, ...]:
    """The global ranks that a gradient is reduced over, with the replicas or without."""
    if isinstance(mesh_info, HSDPMeshInfo) and with_replicas and mesh_info.mesh.ndim == 2:
        return tuple(mesh_info.mesh.mesh.view(-1).tolist())
    if isinstance(mesh_info, FSDPMeshInfo):
        return tuple(dist.get_process_group_ranks(mesh_info.shard_process_group))
    assert isinstance(mesh_info, DDPMeshInfo)
    return tuple(dist.get_process_group_ranks(mesh_info.replicate_process_group))


@dataclass
class ShardingSpec:
    """How one parameter is distributed once it is sharded.

    ``sharded`` describes the shard; ``unsharded`` the gathered parameter if that is itself a DTensor (tensor parallel);
    ``data_parallel_dims`` the axes of the unsharded spec whose partial sums the reduction takes care of.
    """

    sharded: DTensorSpec
    unsharded: DTensorSpec | None = None
    data_parallel_dims: frozenset[int] = frozenset()


def sharding_spec(parameter: torch.Tensor, name: str, info: DataParallelMeshInfo, shard_dim: int) -> ShardingSpec:
    """The spec of ``parameter`` sharded on ``shard_dim`` of ``info``'s mesh.

    Raises:
        ValueError: ``dp_mesh_dims`` was given and the parameter is not a DTensor on that mesh, replicated on its axes.
        NotImplementedError: the parameter has more than two model-parallel axes.
    """
    if not isinstance(parameter, DTensor):
        if info.is_spmd_mesh:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh, but got plain "
                f"tensor for parameter {name!r}; distribute the module first (distribute_module), or pass only the "
                "data-parallel mesh"
            )
        meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
        return ShardingSpec(DTensorSpec(info.mesh, _data_parallel_placements(info, Shard(shard_dim)), tensor_meta=meta))
    if info.is_spmd_mesh:
        return _spmd_spec(parameter._spec, name, info, shard_dim)
    return _tensor_parallel_spec(parameter._spec, name, info, shard_dim)


def _data_parallel_placements(info: DataParallelMeshInfo, shard: Placement) -> tuple[Placement, ...]:
    if isinstance(info, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(info, FSDPMeshInfo) else (Replicate(),)


def _shard_inside(shard_dim: int, split_factor: int) -> Placement:
    """``Shard``, or a strided one where ``split_factor`` pieces of the same dim are cut on later axes."""
    return StridedShard(shard_dim, split_factor=split_factor) if split_factor > 1 else Shard(shard_dim)


def _tensor_parallel_spec(spec: DTensorSpec, name: str, info: DataParallelMeshInfo, shard_dim: int) -> ShardingSpec:
    if len(spec.placements) > 2:
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, but got parameter {name!r} with placements "
            f"{spec.placements}; pass the full mesh and dp_mesh_dims"
        )
    shard = _shard_inside(shard_dim, spec.num_shards_map[shard_dim])
    placements = (*_data_parallel_placements(info, shard), *spec.placements)
    mesh = _join(info.mesh, spec.mesh, name)
    return ShardingSpec(DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta), unsharded=spec)


def _join(data_parallel: DeviceMesh, model_parallel: DeviceMesh, name: str) -> DeviceMesh:
    try:
        return concatenate([data_parallel, model_parallel])
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected the mesh of DTensor parameter {name!r} and the mesh passed to fully_shard to be axes of one "
            "mesh "
            f'(mesh["tp"] and mesh["dp"]), but got {model_parallel} and {data_parallel}'
        ) from error


def _spmd_spec(spec: DTensorSpec, name: str, info: DataParallelMeshInfo, shard_dim: int) -> ShardingSpec:
    mesh, dims = spec.mesh, info.dp_mesh_dims
    if mesh is not info.spmd_mesh:
        raise ValueError(
            f"Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got {mesh} for {name!r} "
            f"instead of {info.spmd_mesh}; distribute the parameters on that very mesh"
        )
    assert dims is not None
    assert mesh.mesh_dim_names is not None
    axis_of = {axis_name: axis for axis, axis_name in enumerate(mesh.mesh_dim_names)}
    shard_axes = [axis_of[axis_name] for axis_name in dims.shard_names]
    replicate_axes = [axis_of[axis_name] for axis_name in dims.replicate_names]
    for axis in shard_axes + replicate_axes:
        if not isinstance(spec.placements[axis], Replicate):
            role = "shard" if axis in shard_axes else "replicate"
            raise ValueError(
                f"Expected Replicate() on DP {role} dim {mesh.mesh_dim_names[axis]!r} of parameter {name!r}, but got "
                f"{spec.placements[axis]}; leave it whole there: fully_shard shards it"
            )
    placements = list(spec.placements)
    for axis in shard_axes:
        later = range(axis + 1, mesh.ndim)
        split = 1
        for other in later:
            placement = spec.placements[other]
            if isinstance(placement, Shard | StridedShard) and placement.dim == shard_dim:
                split *= mesh.size(other)
        placements[axis] = _shard_inside(shard_dim, split)
    sharded = DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    if len(shard_axes) > 1:
        sharded = _merge_shard_axes(sharded, info, dims)
    return ShardingSpec(sharded, unsharded=spec, data_parallel_dims=frozenset(shard_axes + replicate_axes))


def _merge_shard_axes(spec: DTensorSpec, info: DataParallelMeshInfo, dims: DataParallelMeshDims) -> DTensorSpec:
    """The same distribution on a mesh in which the data-parallel shard axes are one."""
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    is_hsdp = isinstance(info, DDPMeshInfo)
    merged = False
    for axis, axis_name in enumerate(spec.mesh.mesh_dim_names or ()):
        if axis_name in dims.shard_names:
            if not merged:
                meshes.append(info.mesh)
                placements.extend([Replicate()] if is_hsdp else [])
                placements.append(spec.placements[axis])
                merged = True
        elif not (is_hsdp and axis_name in dims.replicate_names):
            meshes.append(spec.mesh[axis_name])
            placements.append(spec.placements[axis])
    return DTensorSpec(concatenate(meshes), tuple(placements), tensor_meta=spec.tensor_meta)


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))
