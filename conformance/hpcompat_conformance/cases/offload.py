"""Shards, gradients and optimizer states in CPU memory. On a CPU they are there anyway, and nothing may change."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(sizes=(4, 7, 5, 3), own=True)
OFFLOAD = ("CPUOffloadPolicy",)


def policies(ctx: Context) -> tuple[Any, Any]:
    """None, and the one under test."""
    return ctx.api.OffloadPolicy(), ctx.api.CPUOffloadPolicy(pin_memory=False)


@case("OFF-01", procs=(1, 2, 4), requires=(*OFFLOAD, "bfloat16"))
def the_same_bits(ctx: Context) -> None:
    meshes = [ctx.mesh_2d(size) for size in (1, 2) if ctx.world_size % size == 0]
    mixed = ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")
    for mesh in meshes:
        for policy in (ctx.policy(), mixed):
            options = {"mesh": mesh, "mp_policy": policy}
            models = [
                ctx.shard(ctx.model(RECIPE), units=UNITS, offload_policy=offload, **options)
                for offload in policies(ctx)
            ]
            runs = [trained(ctx, model, RECIPE, steps=(0, 1)) for model in models]
            check_arrays(runs[1], runs[0], what=f"with {options}:")


@case("OFF-01", procs=(1, 2, 4), requires=OFFLOAD, reports=("pytorch/pytorch#180665",))
def microbatches(ctx: Context) -> None:
    meshes = [ctx.mesh_2d(size) for size in (1, 2) if ctx.world_size % size == 0]
    for mesh in meshes:
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=mesh, offload_policy=policies(ctx)[1])
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            ctx.train(model, ctx.inputs(RECIPE, step=step))
        check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE, steps=range(4)), what="gradient")


@case(
    "OFF-02",
    procs=(1, 2, 4),
    requires=(*OFFLOAD, "clip_grad_norm_"),
    reports=("mindspore-ai/hyper-parallel#612", "pytorch/pytorch#148532"),
)
def clipping_and_a_step(ctx: Context) -> None:
    models = [ctx.shard(ctx.model(RECIPE), units=UNITS, offload_policy=policy) for policy in policies(ctx)]
    for model in models:
        optimizer = ctx.framework.optimizer(model, kind="adamw", lr=0.125, multi_tensor=True)
        for step in range(2):
            ctx.train(model, ctx.inputs(RECIPE, step=step))
            check(ctx.clip(model, 1.0) > 1.0, "expected a norm above 1")
            ctx.optimizer_step(optimizer)
            optimizer.zero_grad()
    check_close(ctx.values(models[1]), ctx.values(models[0]), what="value", tolerance=1e-6)


@case("OFF-03", procs=(1, 2), requires=OFFLOAD)
def pinned_memory(ctx: Context) -> None:
    # Only where training works may wrapping go well.
    try:
        policy = ctx.api.CPUOffloadPolicy()
        model = ctx.shard(ctx.model(RECIPE), offload_policy=policy)
    except (RuntimeError, NotImplementedError) as error:
        words = ("pin", "accelerator", "driver")  # the last is the one that a build for an accelerator misses
        check(any(word in str(error).lower() for word in words), f"expected an error about pinning, but got {error!r}")
    else:
        ctx.train(model, ctx.inputs(RECIPE))
        check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE), what="gradient")
