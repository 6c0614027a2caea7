"""Which rank holds what."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

LAYOUT = "hpcompat.core.layout:ShardLayout"


@mutant("PLC-01", "PLC-02")
def rows_split_as_evenly_as_can_be(plant: Plant) -> None:
    """Rows are split into parts that differ by at most one, unlike FSDP2, whose checkpoints then do not fit."""

    def bounds(layout: Any, rank: int) -> tuple[int, int]:
        each, rest = divmod(layout.shape[layout.dim], layout.world_size)
        return rank * each + min(rank, rest), each + (rank < rest)

    plant.around(f"{LAYOUT}.start", lambda original, layout, rank: bounds(layout, rank)[0])
    plant.around(f"{LAYOUT}.length", lambda original, layout, rank: bounds(layout, rank)[1])


@mutant("PLC-03")
def mesh_axes_swapped(plant: Plant) -> None:
    """On a mesh of two axes the first shards and the second replicates."""

    def swapped(original: Any, backend: Any, mesh: Any, dims: Any) -> Any:
        from hpcompat.mesh import HSDPMeshInfo

        if dims is None and mesh.ndim == 2:
            return HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
        return original(backend, mesh, dims)

    plant.around("hpcompat.api:mesh_info_for", swapped)


@mutant("PLC-04")
def always_dim_zero(plant: Plant) -> None:
    """A Shard(1) from shard_placement_fn is taken for a Shard(0)."""
    plant.around("hpcompat_torch.param:shard_dim", lambda original, placement, **options: 0)


@mutant("PLC-04")
def columns_not_put_together(plant: Plant) -> None:
    """The parts of a parameter split along dim 1 are put one below the other."""

    def stacked(original: Any, column: Any, param: Any, *, out: Any) -> None:
        out.view(-1).copy_(column.view(-1))

    plant.around("hpcompat_torch.group:_interleave", stacked)


@mutant("PLC-05")
def one_mesh_for_all_parameters(plant: Plant) -> None:
    """The mesh of a ShardPlacementResult is ignored."""

    def on_the_default(original: Any, parameter: Any, options: Any) -> Any:
        return options.mesh_info, original(parameter, options)[1]

    plant.around("hpcompat.core.wrap:_resolve_placement", on_the_default)


@mutant("PLC-08")
def any_placement_will_do(plant: Plant) -> None:
    """Parameters of one unit may have different mesh infos over the same ranks, of which the last wins."""
    plant.instead("hpcompat.core.wrap:_check_same_mesh_info")
