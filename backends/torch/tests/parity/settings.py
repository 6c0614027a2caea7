"""What a combination means in calls: arguments of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from parity.combos import MESH_SHAPES, Combo
from parity.worlds import half_public, named_mesh


def policy(source: ModuleType, name: str) -> Any:
    """The mixed precision policy of that name, made from the implementation's own class."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    arguments: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"param_dtype": bf16, "reduce_dtype": fp32},
        "fp16": {"param_dtype": fp16, "reduce_dtype": fp16},
        "bf16-both": {"param_dtype": bf16},
        "bf16-reduce": {"reduce_dtype": bf16},
        "fp16-fp32": {"param_dtype": fp16, "reduce_dtype": fp32},
        "output": {"param_dtype": bf16, "reduce_dtype": fp32, "output_dtype": fp32},
        "no-cast": {"param_dtype": fp32, "reduce_dtype": bf16, "cast_forward_inputs": False},
    }
    return source.MixedPrecisionPolicy(**arguments[name])


def wrap_kwargs(source: ModuleType, combo: Combo) -> dict[str, Any]:
    """Keyword arguments of every `fully_shard` call of the combination, without the mesh."""
    kwargs: dict[str, Any] = {"reshard_after_forward": combo.reshard, "mp_policy": policy(source, combo.policy)}
    if "automatic" in combo.options:
        kwargs["reshard_after_forward"] = None
    if "offload" in combo.options:
        kwargs["offload_policy"] = source.CPUOffloadPolicy(pin_memory=False)
    if "columns" in combo.options:
        kwargs["shard_placement_fn"] = by_columns
    if "two-meshes" in combo.options:
        kwargs["shard_placement_fn"] = on_two_meshes(source, combo)
    if "dp-dims" in combo.options:
        shard = tuple(axis for axis in combo.mesh_axes if axis.startswith("shard"))
        replicate = "replicate" if "replicate" in combo.mesh_axes else None
        kwargs["dp_mesh_dims"] = source.DataParallelMeshDims(shard=shard, replicate=replicate)
    return kwargs


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices whose second dim divides by 4 are sharded along it, all else by rows."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def on_two_meshes(source: ModuleType, combo: Combo) -> Callable[[nn.Parameter], Any]:
    """Matrices on an HSDP mesh, all else on a 1-D mesh of the same ranks: two param groups in a unit."""
    result = half_public(source, "ShardPlacementResult")
    flat = half_public(source, "FSDPMeshInfo")(named_mesh((combo.world,), ("shard",)), shard_mesh_dim=0)
    nested = half_public(source, "HSDPMeshInfo")(
        named_mesh(MESH_SHAPES["hsdp", combo.world], ("replicate", "shard")), shard_mesh_dim=1, replicate_mesh_dim=0
    )

    def place(parameter: nn.Parameter) -> Any:
        return result(Shard(0), nested) if parameter.ndim == 2 else result(None, flat)

    return place
