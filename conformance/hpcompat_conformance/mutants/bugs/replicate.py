"""Whole parameters on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant


@mutant("RPL-02")
def replicate_adds_up(plant: Plant) -> None:
    """Under replicate the gradient is the sum over the ranks."""

    def undivided(original: Any, request: Any) -> Any:
        from hpcompat.comm import ReduceOp

        plan = original(request)
        return dataclasses.replace(plan, all_reduce_op=ReduceOp.SUM) if request.shard_world_size == 1 else plan

    plant.around("hpcompat.core.division:divide_plan", undivided)


@mutant("RPL-04")
def replicate_reduces_each_microbatch(plant: Plant) -> None:
    """Under replicate every backward all-reduces, whatever set_requires_gradient_sync says."""

    def synchronise(module: Any, *args: Any, **options: Any) -> None:
        for group in module._groups(True):
            if not group.is_sharded_by_mesh:
                group.reduce_grads = group.all_reduce_grads = True

    plant.after("hpcompat.module:HSDPModule.set_requires_gradient_sync", synchronise)


@mutant("RPL-02")
def replicate_reduces_one_by_one(plant: Plant) -> None:
    """replicate all-reduces each parameter by itself."""

    def unfused(original: Any, backend: Any, modules: Any, options: Any) -> Any:
        return original(backend, modules, dataclasses.replace(options, fuse=options.label != "Replicate"))

    plant.around("hpcompat.api:wrap", unfused)


@mutant("RPL-05")
def replicate_on_two_axes(plant: Plant) -> None:
    """replicate accepts a mesh of two axes and averages over the first."""

    def first_axis(original: Any, backend: Any, mesh: Any, dims: Any) -> Any:
        from hpcompat.mesh import DDPMeshInfo

        is_flat = mesh is None or mesh.ndim == 1 or dims is not None
        return original(backend, mesh, dims) if is_flat else DDPMeshInfo(mesh, replicate_mesh_dim=0)

    plant.around("hpcompat.api:_replicate_info", first_axis)


@mutant("RPL-05")
def replicate_takes_any_setting(plant: Plant) -> None:
    """set_reshard_after_forward after replicate is accepted and does nothing."""
    plant.instead("hpcompat.module:ReplicateModule.set_reshard_after_forward")
