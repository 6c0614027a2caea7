"""Which rank holds what."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context

UNEVEN = Chain(sizes=(4, 7, 5, 3, 1))
UNEVEN_UNITS = tuple(f"layers.{index}" for index in range(4))


def local_shapes(ctx: Context, model: Any) -> dict[str, tuple[int, ...]]:
    """By parameter: the shape of this rank's part."""
    return {name: ctx.framework.local(p).shape for name, p in ctx.framework.parameters(model).items()}


@case("PLC-01", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#196", "mindspore-ai/hyper-parallel#710"))
def rows_of_each_rank(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), units=UNEVEN_UNITS)
    rows: dict[int, dict[int, tuple[int, ...]]] = {
        1: {7: (7,), 5: (5,), 3: (3,), 1: (1,)},
        2: {7: (4, 3), 5: (3, 2), 3: (2, 1), 1: (1, 0)},
        4: {7: (2, 2, 2, 1), 5: (2, 2, 1, 0), 3: (1, 1, 1, 0), 1: (1, 0, 0, 0)},
    }
    expected: dict[str, tuple[int, ...]] = {}
    for index, (num_rows, num_columns) in enumerate(((7, 4), (5, 7), (3, 5), (1, 3))):
        here = rows[ctx.world_size][num_rows][ctx.rank]
        expected[f"layers.{index}.weight"] = (here, num_columns)
        expected[f"layers.{index}.bias"] = (here,)
    check_equal(local_shapes(ctx, model), expected, what="shapes of this rank's parts")


@case("PLC-01", procs=(2, 4), reports=("mindspore-ai/hyper-parallel#196", "mindspore-ai/hyper-parallel#710"))
def the_parts_are_the_rows_in_order(ctx: Context) -> None:
    model = ctx.model(UNEVEN)
    values = ctx.values(model)
    ctx.shard(model, units=UNEVEN_UNITS)
    for name, parameter in ctx.framework.parameters(model).items():
        full = values[name]
        chunk = -(-len(full) // ctx.world_size)
        expected = full[ctx.rank * chunk : (ctx.rank + 1) * chunk]
        check_arrays({name: ctx.framework.local(parameter)}, {name: expected}, what="this rank's part")


@case("PLC-02", procs=(1, 2, 4), reports=("ByteDance-Seed/VeOmni#974",))
def training_with_empty_parts(ctx: Context) -> None:
    truth, model = ctx.model(UNEVEN), ctx.shard(ctx.model(UNEVEN), units=UNEVEN_UNITS)
    optimizers = [ctx.framework.optimizer(m, kind="adamw", lr=0.5) for m in (truth, model)]
    for rank in range(ctx.world_size):
        ctx.train(truth, ctx.inputs(UNEVEN, rank=rank), scale=1 / ctx.world_size)
    ctx.train(model, ctx.inputs(UNEVEN))
    check_arrays(ctx.gradients(model), ctx.true_gradients(UNEVEN), what="gradient")
    for optimizer in optimizers:
        optimizer.step()
    check_arrays(ctx.values(model), ctx.values(truth), what="value after a step")


@case("PLC-03", procs=(2, 4), reports=("mindspore-ai/hyper-parallel#306",))
def the_second_axis_shards(ctx: Context) -> None:
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        model = ctx.model(Chain())
        values = ctx.values(model)
        ctx.shard(model, units=UNEVEN_UNITS[:3], mesh=ctx.mesh_2d(num_replicas))
        shard_size = ctx.world_size // num_replicas
        place = ctx.rank % shard_size
        for name, parameter in ctx.framework.parameters(model).items():
            rows = len(values[name]) // shard_size
            expected = values[name][place * rows : (place + 1) * rows]
            what = f"this rank's part with {num_replicas} replicas"
            check_arrays({name: ctx.framework.local(parameter)}, {name: expected}, what=what)


@case("PLC-04", procs=(1, 2, 4))
def split_along_dim_one(ctx: Context) -> None:
    def place(parameter: Any) -> Any:
        return ctx.framework.shard(1) if len(ctx.framework.shape(parameter)) == 2 else None

    model = ctx.model(Chain())
    values = ctx.values(model)
    ctx.shard(model, units=UNEVEN_UNITS[:3], shard_placement_fn=place)
    for name, parameter in ctx.framework.parameters(model).items():
        dim = values[name].ndim - 1
        size = values[name].shape[dim] // ctx.world_size
        index = (slice(None),) * dim + (slice(ctx.rank * size, (ctx.rank + 1) * size),)
        check_arrays({name: ctx.framework.local(parameter)}, {name: values[name][index]}, what="this rank's part")
    ctx.train(model, ctx.inputs(Chain()))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain()), what="gradient")
    check_arrays(ctx.values(model), values, what="value")
