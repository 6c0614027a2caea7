"""Whole parameters on every rank: `replicate`, and how it compares with `fully_shard`."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain, Probe
from hpcompat_conformance.run_context import Context, steps
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
REPLICATE = ("replicate", "ReplicateModule")


@case("RPL-01", procs=(1, 2, 4), requires=REPLICATE)
def class_and_whole_parameters(ctx: Context) -> None:
    model = ctx.model(RECIPE)
    original, values = type(model), ctx.values(model)
    check(ctx.api.replicate(model, mesh=ctx.mesh()) is model, "expected replicate to return its argument")
    for expected in (original, ctx.api.ReplicateModule, ctx.api.FSDPModule):
        check(isinstance(model, expected), f"expected an instance of {expected}, but got {type(model)}")
    parts = {name: ctx.framework.local(parameter) for name, parameter in ctx.framework.parameters(model).items()}
    check_arrays(parts, values, what="this rank's part")
    check_equal({name for name, is_sharded in ctx.sharded(model).items() if is_sharded}, set(), what="sharded")


@case("RPL-02", procs=(1, 2, 4), requires=REPLICATE, reports=("pytorch/torchtitan#2318",))
def the_mean_by_one_all_reduce_a_unit(ctx: Context) -> None:
    model = ctx.replicate(ctx.model(RECIPE), units=UNITS)
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(RECIPE))
    # On one process too; there it is one of one rank, which sends nothing.
    expected = "all-reduce 2, all-reduce 1, all-reduce root, all-reduce 0"
    check_equal(ctx.schedule(log, shard_size=1), steps(expected, over=ctx.world_size), what="collectives")
    check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE), what="gradient")


@case("RPL-03", procs=(1, 2, 4), requires=(*REPLICATE, "bfloat16"), reports=("pytorch/torchtitan#2318",))
def the_bits_of_a_shard_axis_of_one(ctx: Context) -> None:
    for policy in (ctx.policy(), ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")):
        sharded = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=ctx.mesh_2d(ctx.world_size), mp_policy=policy)
        replicated = ctx.replicate(ctx.model(RECIPE), units=UNITS, mp_policy=policy)
        check_arrays(trained(ctx, replicated, RECIPE), trained(ctx, sharded, RECIPE), what=f"with {policy}:")


@case("RPL-04", procs=(1, 2, 4), requires=(*REPLICATE, "bfloat16"))
def microbatches(ctx: Context) -> None:
    model = ctx.replicate(ctx.model(Probe()), mp_policy=ctx.policy(param_dtype="bfloat16", reduce_dtype="float32"))
    with ctx.record() as log:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            ctx.train(model, ctx.inputs(Probe(), step=step))
    check_equal([event.kind for event in log], ["all_reduce"], what="collectives of three microbatches")
    check_arrays(ctx.gradients(model), ctx.true_gradients(Probe(), steps=range(3)), what="gradient")


@case("RPL-05", procs=(2, 4), requires=REPLICATE)
def what_is_refused(ctx: Context) -> None:
    with check_raises(RuntimeError, containing="already managed by `fully_shard`"):
        ctx.api.replicate(ctx.shard(ctx.model(RECIPE)), mesh=ctx.mesh())
    with check_raises(ValueError, containing="replicate expects a 1D DeviceMesh"):
        ctx.api.replicate(ctx.model(RECIPE), mesh=ctx.mesh_2d(2))
    with check_raises(AssertionError, containing=""):
        ctx.replicate(ctx.model(RECIPE)).set_reshard_after_forward(True)


def with_replicated_biases(ctx: Context, **options: Any) -> Any:
    """Wrap unit by unit, the biases of each in its ``replicate_params``."""
    model = ctx.model(RECIPE)
    for path in (*UNITS, ""):
        module = ctx.framework.child(model, path)
        biases = {
            parameter
            for name, parameter in ctx.framework.parameters(module).items()
            if name == "bias" or (not path and name == "scale")
        }
        ctx.api.fully_shard(module, replicate_params=biases, **options)
    return model


@case(
    "RPL-06",
    procs=(1, 2, 4),
    requires=("fully_shard.replicate_params",),
    reports=("mindspore-ai/hyper-parallel#279", "mindspore-ai/hyper-parallel#735"),
)
def replicated_parameters_of_a_sharded_unit(ctx: Context) -> None:
    for num_replicas in (size for size in (1, 2, 4) if ctx.world_size % size == 0):
        mesh = ctx.mesh() if num_replicas == 1 else ctx.mesh_2d(num_replicas)
        model = with_replicated_biases(ctx, mesh=mesh)
        found = ctx.sharded(model)
        check_equal(found, {name: name.endswith("weight") for name in found}, what="sharded")
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(RECIPE))
        truth = ctx.true_gradients(RECIPE)
        check_arrays(ctx.gradients(model), truth, what=f"gradient with {num_replicas} replicas")
        parts = {name: ctx.framework.local(p) for name, p in ctx.framework.parameters(model).items()}
        values = ctx.values(ctx.model(RECIPE))
        whole = {name for name, part in parts.items() if part.shape == values[name].shape}
        if ctx.world_size > num_replicas:
            check_equal(whole, {name for name in parts if not name.endswith("weight")}, what="whole on this rank")
        if ctx.world_size > 1 and num_replicas == 1:
            kinds = [event.kind for event in log if event.kind != "all_gather"]
            check_equal(sorted(kinds), ["all_reduce"] * 4 + ["reduce_scatter"] * 3, what="reductions")
            sizes = {event.num_elements for event in log if event.kind == "all_reduce"}
            check_equal(sizes, {8, 12, 16}, what="elements all-reduced")


@case("RPL-06", procs=(2, 4), requires=("fully_shard.replicate_params", *REPLICATE))
def replicated_parameters_train_as_under_replicate(ctx: Context) -> None:
    # Exact numbers: the two send different buffers, so rough ones would be added up in different orders.
    models = [ctx.replicate(ctx.model(RECIPE), units=UNITS), with_replicated_biases(ctx, mesh=ctx.mesh())]
    for model in models:
        for step in range(2):
            ctx.train(model, ctx.inputs(RECIPE, step=step))
    check_arrays(ctx.gradients(models[1]), ctx.gradients(models[0]), what="gradient")
