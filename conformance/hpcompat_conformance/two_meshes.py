"""One unit whose parameters have meshes of their own."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.run_context import Context


def shard_on_two_meshes(ctx: Context, model: Any) -> Any:
    """Wrap in one unit: matrices sharded over the outer axis of a mesh of two, the rest over the inner one. Gives the
    module."""
    mesh = ctx.framework.mesh((ctx.world_size // 2, 2), axis_names=("outer", "inner"))
    outer, inner = (ctx.api.FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("outer", "inner"))

    def place(parameter: Any) -> Any:
        info = outer if len(ctx.framework.shape(parameter)) == 2 else inner
        return ctx.api.ShardPlacementResult(ctx.framework.shard(0), info)

    return ctx.shard(model, mesh=ctx.mesh(), shard_placement_fn=place)
