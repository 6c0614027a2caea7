"""What the gradients are."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close, check_equal
from hpcompat_conformance.recipes import Branches, Chain, Probe
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
# A division by 3 or 300 may be done in two roundings, as a multiplication, and before the sum.
DIVISION_TOLERANCE = 2.0**-21


def set_factor(ctx: Context, model: Any, factor: float) -> None:
    """The setter does not recurse."""
    for module in (model, *(ctx.framework.child(model, path) for path in UNITS)):
        module.set_gradient_divide_factor(factor)


def check_factor(ctx: Context, factor: float, *, mesh: Any, what: str) -> None:
    """One step with the factor against the sum over the ranks divided by it."""
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, mesh=mesh)
    set_factor(ctx, model, factor)
    ctx.train(model, ctx.inputs(Chain(own=True)))
    truth = ctx.true_gradients(Chain(own=True), divide_by=factor)
    check_close(ctx.gradients(model), truth, what=f"gradient with {what}", tolerance=DIVISION_TOLERANCE)


@case("RED-01", procs=(1, 2, 4))
def the_mean_over_the_ranks(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(own=True))
    for policy in (None, True, False, ctx.world_size):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        ctx.train(model, ctx.inputs(Chain(own=True)))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("RED-01", procs=(4,))
def the_mean_over_the_ranks_with_an_int(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 7, 5, 3), own=True)
    model = ctx.shard(ctx.model(recipe), units=UNITS, reshard_after_forward=2)
    for step in range(2):
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(recipe, step=step))
        check_arrays(ctx.gradients(model), ctx.true_gradients(recipe, steps=(step,)), what=f"gradient of step {step}")


@case("RED-02", procs=(1, 2, 4))
def the_mean_whatever_the_mesh(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(own=True))
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, mesh=ctx.mesh_2d(num_replicas))
        ctx.train(model, ctx.inputs(Chain(own=True)))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with {num_replicas} replicas")


@case("RED-14", procs=(2, 4), requires=("a transport that adds up",), reports=("pytorch/pytorch#162338",))
def the_mean_where_an_average_adds_up(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(own=True))
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        shape, names = (num_replicas, ctx.world_size // num_replicas), ("replicate", "shard")
        first = 1 if num_replicas == 1 else 0
        with ctx.framework.mesh_that_adds_up(shape[first:], axis_names=names[first:]) as mesh:
            model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, mesh=mesh)
            ctx.train(model, ctx.inputs(Chain(own=True)))
            check_arrays(ctx.gradients(model), truth, what=f"gradient with {num_replicas} replicas")


@case("RED-03", procs=(1, 2, 4), reports=("ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"))
def a_factor_of_the_number_of_ranks(ctx: Context) -> None:
    check_factor(ctx, float(ctx.world_size), mesh=ctx.mesh(), what="the usual factor")


@case(
    "RED-03",
    procs=(1, 2, 4),
    reports=("pytorch/pytorch#155903", "ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"),
)
def a_factor_of_three(ctx: Context) -> None:
    check_factor(ctx, 3.0, mesh=ctx.mesh(), what="factor 3")


@case(
    "RED-03",
    procs=(1, 2, 4),
    reports=("pytorch/pytorch#155903", "ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"),
)
def a_factor_of_three_hundred(ctx: Context) -> None:
    check_factor(ctx, 300.0, mesh=ctx.mesh(), what="factor 300")


@case("RED-03", procs=(4,), reports=("pytorch/pytorch#155903", "ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"))
def factors_under_hsdp(ctx: Context) -> None:
    for factor in (1.0, 3.0, 300.0):
        check_factor(ctx, factor, mesh=ctx.mesh_2d(2), what=f"factor {factor} on a 2 x 2 mesh")


@case("RED-03", procs=(2, 4), reports=("pytorch/pytorch#155903", "mindspore-ai/hyper-parallel#306"))
def factors_over_a_shard_axis_of_one(ctx: Context) -> None:
    for factor in (1.0, 3.0, 300.0):
        check_factor(ctx, factor, mesh=ctx.mesh_2d(ctx.world_size), what=f"factor {factor}, replicas only")


@case("RED-03", procs=(1, 2, 4))
def a_factor_while_accumulating(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    set_factor(ctx, model, float(ctx.world_size))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        ctx.train(model, ctx.inputs(Chain(), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(3)), what="gradient")


@case(
    "RED-03",
    procs=(2, 4),
    requires=("FSDPModule.set_force_sum_reduction_for_comms",),
    reports=("pytorch/pytorch#155903",),
)
def a_factor_that_changes_between_steps(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    for module in (model, *(ctx.framework.child(model, path) for path in UNITS)):
        # Not every process group multiplies before it adds.
        module.set_force_sum_reduction_for_comms(True)
    for step, factor in enumerate((None, 2.0, 16.0)):
        if factor is not None:
            set_factor(ctx, model, factor)
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(Chain(), step=step))
        truth = ctx.true_gradients(Chain(), steps=(step,), divide_by=factor)
        check_close(ctx.gradients(model), truth, what=f"gradient with {factor}", tolerance=DIVISION_TOLERANCE)


@case("RED-04", procs=(1, 2, 4), reports=("ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"))
def a_factor_of_one_is_a_sum(ctx: Context) -> None:
    check_factor(ctx, 1.0, mesh=ctx.mesh(), what="factor 1")


@case(
    "RED-05",
    procs=(1, 2, 4),
    requires=("FSDPModule.set_reduce_scatter_unused_params",),
    reports=("pytorch/pytorch#158719",),
)
def ranks_that_use_different_parameters(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()))
    model.set_reduce_scatter_unused_params(True)

    def train(model: Any, inputs: Any, rank: int) -> None:
        ctx.train(model, inputs, use=(1 + rank % 2,))

    train(model, ctx.inputs(Branches()), ctx.rank)
    truth = ctx.true_gradients(Branches(), train=train)
    if ctx.world_size == 1:  # nobody uses layers.2: zeros
        truth |= {name: 0 * truth[name.replace("2", "1")] for name in ("layers.2.weight", "layers.2.bias")}
    check_arrays(ctx.gradients(model), truth, what="gradient")


@case("RED-06", procs=(1, 2, 4), requires=("float16",))
def a_factor_is_applied_once_with_float16(ctx: Context) -> None:
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        model = ctx.model(Probe())
        ctx.shard(model, mesh=ctx.mesh_2d(num_replicas), mp_policy=ctx.policy(reduce_dtype="float16"))
        model.set_gradient_divide_factor(4.0)
        ctx.train(model, ctx.inputs(Probe()))
        truth = ctx.true_gradients(Probe(), divide_by=4.0)
        check_arrays(ctx.gradients(model), truth, what=f"gradient with {num_replicas} replicas")


@case("RED-07", procs=(1, 2, 4))
def a_parameter_that_nobody_used(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()))
    ctx.train(model, ctx.inputs(Branches()), use=(2,))
    truth = ctx.true_gradients(Branches(), use=(2,))
    found = {name: gradient for name, gradient in ctx.gradients(model).items() if gradient is not None}
    check_arrays(found, truth, what="gradient")


@case("RED-08", procs=(1, 2, 4))
def steps_of_sgd_and_adamw(ctx: Context) -> None:
    for kind in ("sgd", "adamw"):
        truth, model = ctx.model(Chain(own=True)), ctx.shard(ctx.model(Chain(own=True)), units=UNITS)
        start = ctx.values(truth)
        for rank in range(ctx.world_size):
            ctx.train(truth, ctx.inputs(Chain(own=True), rank=rank), scale=1 / ctx.world_size)
        ctx.train(model, ctx.inputs(Chain(own=True)))
        for trained in (truth, model):
            ctx.framework.optimizer(trained, kind=kind, lr=0.125).step()
        check_arrays(ctx.values(model), ctx.values(truth), what=f"value after {kind}")
        check(any((value != start[name]).any() for name, value in ctx.values(model).items()), f"{kind} did nothing")


@case("RED-08", procs=(2, 4))
def gradients_have_the_form_of_their_parameters(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(sizes=(4, 7, 5, 3))), units=UNITS)
    ctx.train(model, ctx.inputs(Chain(sizes=(4, 7, 5, 3))))
    for name, parameter in ctx.framework.parameters(model).items():
        gradient = ctx.framework.gradient(parameter)
        check(gradient is not None and ctx.framework.is_sharded(gradient), f"expected a sharded gradient of {name}")
        parts = [ctx.framework.local(tensor).shape for tensor in (gradient, parameter)]
        check_equal(parts[0], parts[1], what=f"shape of this rank's part of the gradient of {name}")
