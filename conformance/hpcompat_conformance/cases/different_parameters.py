"""Ranks that use different parameters of a unit: an error before anything wrong is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import CheckFailed, check, check_arrays
from hpcompat_conformance.recipes import Branches
from hpcompat_conformance.run_context import Context

SETTER = "set_reduce_scatter_unused_params"
REQUIRES = (f"FSDPModule.{SETTER}",)


def check_refused(ctx: Context, model: Any, use: Sequence[int], *, naming: str) -> None:
    """This rank's step must fail, and after a reset the ranks must be able to train together."""
    try:
        ctx.train(model, ctx.inputs(Branches()), use=use)
    except RuntimeError as error:
        told = str(error)
    else:
        raise CheckFailed("expected an error, as the ranks use different parameters, but got none")
    check(SETTER in told and naming in told, f"expected an error that names {SETTER} and {naming}, but got {told!r}")
    model.reset_iter_state()
    ctx.framework.zero_grad(model)
    ctx.train(model, ctx.inputs(Branches(), step=1))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Branches(), steps=(1,)), what="gradient of the next batch")


@case("RED-11", procs=(2, 4), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def as_many_elements_on_every_rank(ctx: Context) -> None:
    check_refused(ctx, ctx.shard(ctx.model(Branches())), (1 + ctx.rank % 2,), naming="layers.2.weight")


@case("RED-11", procs=(4,), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def as_many_elements_on_every_rank_under_hsdp(ctx: Context) -> None:
    for use in (1 + ctx.rank % 2, 1 + ctx.rank // 2, 1 + (ctx.rank == 3)):
        check_refused(ctx, ctx.shard(ctx.model(Branches()), mesh=ctx.mesh_2d(2)), (use,), naming="layers.2.weight")


@case("RED-11", procs=(2, 4), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def as_many_elements_on_every_replica(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()), mesh=ctx.mesh_2d(ctx.world_size))
    check_refused(ctx, model, (1 + ctx.rank % 2,), naming="layers.2.weight")


@case("RED-11", procs=(2, 4), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def more_elements_on_some_ranks(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()))
    check_refused(ctx, model, (1, 2) if ctx.rank == 0 else (2,), naming="layers.1.bias")


@case("RED-11", procs=(4,), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def more_elements_on_some_ranks_under_hsdp(ctx: Context) -> None:
    # The root's gradients come last; with several buffers the reduction of layers.2 is still on its way.
    for num_buffers in (1, 4):
        model = ctx.shard(ctx.model(Branches()), units=("layers.2",), mesh=ctx.mesh_2d(2))
        model.set_reduce_scatter_max_input_buffers(num_buffers)
        check_refused(ctx, model, (2,) if ctx.rank == 0 else (1, 2), naming="layers.1.bias")


@case("RED-11", procs=(2, 4), requires=REQUIRES, reports=("pytorch/pytorch#158719",))
def after_steps_that_went_well(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()))
    for use in ((1,), (1, 2), (2,)):
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(Branches()), use=use)
        found = {name: gradient for name, gradient in ctx.gradients(model).items() if gradient is not None}
        check_arrays(found, ctx.true_gradients(Branches(), use=use), what=f"gradient where all ranks use {use}")
    # One rank does as before, so it has begun when the others find out.
    check_refused(ctx, model, (2,) if ctx.rank == 1 else (1,), naming="layers.1.weight")
