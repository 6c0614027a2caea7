"""One collective a unit or one a parameter, and where the shards lie."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(sizes=(4, 7, 5, 3))
FUSION = ("fully_shard.comm_fusion",)
ZERO_COPY = ("fully_shard.comm_fusion_zero_copy",)


def collectives_of_a_step(ctx: Context, model: Any) -> list[tuple[str, int]]:
    """Kinds and sizes."""
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(RECIPE, rough=True))
    ctx.framework.zero_grad(model)
    return [(event.kind, event.num_elements) for event in log]


@case("FUS-01", procs=(2, 4), requires=FUSION)
def one_collective_a_parameter(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS, comm_fusion=False, reshard_after_forward=False)
    # Rows 7, 5 and 3, padded, of 4, 7 and 5 columns, and a bias.
    rows = {2: (8, 6, 4), 4: (8, 8, 4)}[ctx.world_size]
    sizes = [size for n, columns in zip(rows, (4, 7, 5), strict=True) for size in (n * columns, n)]
    expected = [("all_gather", size) for size in sizes] + [("reduce_scatter", size) for size in sizes[::-1]]
    check_equal(collectives_of_a_step(ctx, model), expected, what="collectives")


@case("FUS-01", procs=(1, 2, 4), requires=FUSION)
def the_same_gradients_one_by_one(ctx: Context) -> None:
    meshes = [ctx.mesh()] + ([ctx.mesh_2d(2)] if ctx.world_size == 4 else [])
    for mesh in meshes:
        for policy in (True, False):
            options = {"mesh": mesh, "reshard_after_forward": policy, "comm_fusion": False}
            model = ctx.shard(ctx.model(RECIPE), units=UNITS, **options)
            for step in range(3):
                model.set_requires_gradient_sync(step != 1)
                ctx.train(model, ctx.inputs(RECIPE, step=step))
            truth = ctx.true_gradients(RECIPE, steps=range(3))
            check_arrays(ctx.gradients(model), truth, what=f"gradient with {options}")


@case("FUS-01", procs=(1, 2), requires=(*FUSION, "bfloat16"))
def the_same_bits_one_by_one(ctx: Context) -> None:
    # Of two numbers the sum is the same in either order; of four it depends on where in a buffer they travel.
    for policy in (ctx.policy(), ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")):
        results = [
            trained(ctx, ctx.shard(ctx.model(RECIPE), units=UNITS, comm_fusion=fuses, mp_policy=policy), RECIPE)
            for fuses in (True, False)
        ]
        check_arrays(results[1], results[0], what=f"with comm_fusion=False and {policy}:")


@case("FUS-02", procs=(1, 2, 4), requires=(*ZERO_COPY, "bfloat16"))
def bits_and_collectives_without_copies(ctx: Context) -> None:
    for policy in (ctx.policy(), ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")):
        results = []
        for zero_copy in (None, True, False):
            options = {"comm_fusion_zero_copy": zero_copy, "mp_policy": policy}
            model = ctx.shard(ctx.model(RECIPE), units=UNITS, **options)
            results.append((collectives_of_a_step(ctx, model), trained(ctx, model, RECIPE)))
        for log, found in results[1:]:
            check_equal(log, results[0][0], what="collectives")
            check_arrays(found, results[0][1], what=f"with {policy}:")


@case("FUS-02", procs=(1,), requires=(*FUSION, *ZERO_COPY))
def what_is_no_bool_is_refused(ctx: Context) -> None:
    for option, value in (("comm_fusion", 1), ("comm_fusion", None), ("comm_fusion_zero_copy", "yes")):
        with check_raises(TypeError, containing=option):
            ctx.shard(ctx.model(RECIPE), **{option: value})
