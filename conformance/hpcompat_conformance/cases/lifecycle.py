"""What a wrapped module looks like and does, from wrapping over training to its state dict."""

from __future__ import annotations

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal, check_raises
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Branches, Chain, Tied
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")


def check_forms(ctx: Context, model: object, *, unsharded: tuple[str, ...], when: str) -> None:
    """The parameters whose names start so, and no others, must be registered in full."""
    found = ctx.sharded(model)
    check_equal(found, {name: not name.startswith(unsharded) for name in found}, what=f"sharded, {when}")


@case("LIF-01", procs=(1, 2))
def the_argument_comes_back_with_a_new_class(ctx: Context) -> None:
    model = ctx.model(Chain())
    original = type(model)
    layer = ctx.framework.child(model, "layers.0")
    check(ctx.api.fully_shard(layer, mesh=ctx.mesh()) is layer, "expected fully_shard to return its argument")
    check(ctx.api.fully_shard(model, mesh=ctx.mesh()) is model, "expected fully_shard to return its argument")
    check(isinstance(model, original), f"expected an instance of {original}, but got {type(model)}")
    for module, expected in ((model, True), (layer, True), (ctx.framework.child(model, "layers.1"), False)):
        check_equal(isinstance(module, ctx.api.FSDPModule), expected, what=f"{type(module)} is an FSDPModule")


@case("LIF-02", procs=(1, 2, 4))
def parameters_keep_names_order_shapes_and_values(ctx: Context) -> None:
    model = ctx.model(Chain(own=True))
    shapes = [(name, ctx.framework.shape(p)) for name, p in ctx.framework.parameters(model).items()]
    values = ctx.values(model)
    ctx.shard(model, units=UNITS)
    after = [(name, ctx.framework.shape(p)) for name, p in ctx.framework.parameters(model).items()]
    check_equal(after, shapes, what="names and shapes")
    check_forms(ctx, model, unsharded=(), when="after wrapping")
    check_arrays(ctx.values(model), values, what="value")


@case("LIF-03", procs=(1, 2, 4), reports=("pytorch/pytorch#144289", "pytorch/pytorch#131965", "pytorch/pytorch#154655"))
def forms_through_a_step(ctx: Context) -> None:
    kept = {None: ("scale",), True: (), False: ("scale", "layers.")}
    for policy, unsharded in kept.items():
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        output = model(ctx.inputs(Chain(own=True)))
        check_forms(ctx, model, unsharded=unsharded, when=f"after forward with {policy}")
        ctx.framework.backward(ctx.framework.loss(output))
        check_forms(ctx, model, unsharded=(), when=f"after backward with {policy}")


@case("LIF-04", procs=(1, 2, 4))
def gradients_of_a_unit_called_twice(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 8, 8, 16), order=(0, 1, 1, 2))
    truth = ctx.true_gradients(recipe)
    for policy in (True, False):
        model = ctx.shard(ctx.model(recipe), units=UNITS, reshard_after_forward=policy)
        ctx.train(model, ctx.inputs(recipe))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("LIF-05", procs=(1, 2, 4))
def two_forwards_before_one_backward(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(own=True), steps=range(2))
    for policy in (True, False):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        losses = [ctx.framework.loss(model(ctx.inputs(Chain(own=True), step=step))) for step in range(2)]
        ctx.framework.backward(losses[0] + losses[1])
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")
        check_forms(ctx, model, unsharded=(), when="after backward")


@case("LIF-06", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#436",))
def frozen_then_unfrozen(ctx: Context) -> None:
    model = ctx.model(Chain())
    layer = ctx.framework.child(model, "layers.1")
    ctx.framework.set_requires_grad(layer, False)
    ctx.shard(model, units=UNITS)
    ctx.train(model, ctx.inputs(Chain()))
    truth = ctx.true_gradients(Chain())
    trained = {name: array for name, array in truth.items() if not name.startswith("layers.1.")}
    found = {name: gradient for name, gradient in ctx.gradients(model).items() if gradient is not None}
    check_arrays(found, trained, what="gradient while layers.1 is frozen")
    ctx.framework.zero_grad(model)
    ctx.framework.set_requires_grad(layer, True)
    ctx.train(model, ctx.inputs(Chain()))
    check_arrays(ctx.gradients(model), truth, what="gradient after unfreezing")


@case("LIF-06", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#436",))
def one_frozen_parameter_in_a_unit(ctx: Context) -> None:
    model = ctx.model(Chain())
    ctx.framework.set_requires_grad(ctx.framework.child(model, "layers.1"), False)
    ctx.shard(model)
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(Chain()))
    trained = {name: array for name, array in ctx.true_gradients(Chain()).items() if not name.startswith("layers.1.")}
    found = {name: gradient for name, gradient in ctx.gradients(model).items() if gradient is not None}
    check_arrays(found, trained, what="gradient")
    if ctx.world_size > 1:
        reduced = sum(event.num_elements for event in log if event.kind == "reduce_scatter")
        check_equal(reduced, sum(array.size for array in trained.values()), what="elements reduced")


@case("LIF-07", procs=(1, 2, 4), reports=("pytorch/pytorch#176076",))
def every_row_of_a_tied_parameter_is_trained(ctx: Context) -> None:
    truth, model = ctx.model(Tied()), ctx.model(Tied())
    names = list(ctx.framework.parameters(model))
    ctx.shard(model)
    check_equal(list(ctx.framework.parameters(model)), names, what="names of distinct parameters")
    optimizers = [ctx.framework.optimizer(m, kind="sgd", lr=2.0**-6) for m in (truth, model)]
    start = ctx.values(truth)
    for step in range(2):
        for rank in range(ctx.world_size):
            ctx.train(truth, ctx.inputs(Tied(), step=step, rank=rank), scale=1 / ctx.world_size)
        ctx.train(model, ctx.inputs(Tied(), step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    moved = (ctx.values(truth)["embed.weight"] != start["embed.weight"]).any(axis=1)
    check_equal(moved.tolist(), [True] * 7, what="rows that the unsharded run moves")
    check_arrays(ctx.values(model), ctx.values(truth), what="value", ulps=4)


@case("LIF-08", procs=(1,), reports=("mindspore-ai/hyper-parallel#306",))
def one_process_trains_with_the_same_bits(ctx: Context) -> None:
    truth, model = ctx.model(Chain(own=True)), ctx.shard(ctx.model(Chain(own=True)), units=UNITS)
    check_forms(ctx, model, unsharded=(), when="after wrapping")
    optimizers = [ctx.framework.optimizer(m, kind="adamw", lr=0.05) for m in (truth, model)]
    for step in range(4):
        for trained, optimizer in zip((truth, model), optimizers, strict=True):
            ctx.train(trained, ctx.inputs(Chain(own=True), step=step))
            optimizer.step()
            optimizer.zero_grad()
    check_arrays(ctx.values(model), ctx.values(truth), what="value")


@case("LIF-09", procs=(1, 2))
def wrapping_twice_is_refused(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()))
    with check_raises(Exception, containing="can only be applied to a module once"):
        ctx.api.fully_shard(model, mesh=ctx.mesh())


@case("LIF-10", procs=(1, 2, 4))
def evaluation_between_steps(ctx: Context) -> None:
    for policy in (True, False):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        optimizer = ctx.framework.optimizer(model, kind="sgd", lr=2.0**-12)
        ctx.train(model, ctx.inputs(Chain(own=True)))
        optimizer.step()
        optimizer.zero_grad()
        with ctx.framework.no_grad():
            evaluated = ctx.framework.array(model(ctx.inputs(Chain(own=True), step=1)))
        trained = model(ctx.inputs(Chain(own=True), step=1))
        check_arrays({"output": evaluated}, {"output": ctx.framework.array(trained)}, what="evaluation after a step")
        ctx.framework.backward(ctx.framework.loss(trained))
        check_forms(ctx, model, unsharded=(), when="after backward")


@case("LIF-11", procs=(1, 2, 4))
def a_list_of_modules_run_in_part(ctx: Context) -> None:
    model = ctx.model(Branches())
    ctx.api.fully_shard(ctx.framework.child(model, "layers.0"), mesh=ctx.mesh())
    members = [ctx.framework.child(model, path) for path in UNITS[1:]]
    ctx.api.fully_shard(members, mesh=ctx.mesh())
    ctx.shard(model)
    forms: list[dict[str, bool]] = []
    ctx.framework.on_forward(members[0], after=lambda output: forms.append(ctx.sharded(members[1])))
    truth: dict[str, Array] = {}
    for step, use in enumerate(((1,), (1, 2), (2,))):
        with ctx.framework.no_grad():
            model(ctx.inputs(Branches(), step=step), use=use)
        check_forms(ctx, model, unsharded=(), when=f"after a forward of layers {use}")
        ctx.train(model, ctx.inputs(Branches(), step=step), use=use)
        check_forms(ctx, model, unsharded=(), when=f"after backward of layers {use}")
        part = ctx.true_gradients(Branches(), steps=(step,), use=use)
        truth |= {name: truth.get(name, np.float32(0)) + gradient for name, gradient in part.items()}
    check_arrays(ctx.gradients(model), truth, what="gradient")
    check_equal({value for form in forms for value in form.values()}, {False}, what="sharded after the first of two")


@case("RSF-08", procs=(1, 2, 4))
def unshard_and_reshard_by_hand(ctx: Context) -> None:
    model = ctx.model(Chain())
    values = ctx.values(model)
    ctx.shard(model, units=UNITS)
    layer = ctx.framework.child(model, "layers.1")
    check_equal(layer.unshard(), None, what="result of unshard()")
    check_forms(ctx, model, unsharded=("layers.1.",), when="after unshard()")
    check_arrays(ctx.values(model), values, what="value after unshard()")
    layer.reshard()
    check_forms(ctx, model, unsharded=(), when="after reshard()")
    ctx.train(model, ctx.inputs(Chain()))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain()), what="gradient")


@case("RSF-09", procs=(1, 2, 4))
def unshard_with_a_handle(ctx: Context) -> None:
    model = ctx.model(Chain())
    values = ctx.values(model)
    ctx.shard(model, units=UNITS)
    handles = [ctx.framework.child(model, path).unshard(async_op=True) for path in UNITS[:2]]
    for handle in handles:
        handle.wait()
    check_forms(ctx, model, unsharded=UNITS[:2], when="after wait()")
    check_arrays(ctx.values(model), values, what="value after wait()")
    handles[0].wait()  # harmless
    ctx.train(model, ctx.inputs(Chain()))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain()), what="gradient")


@case("RSF-10", procs=(2, 4))
def kept_after_backward(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    ctx.train(model, ctx.inputs(Chain(), step=0))
    with ctx.record() as log:
        model.set_reshard_after_backward(True)
        ctx.train(model, ctx.inputs(Chain(), step=1))
    check_equal({event.kind for event in log}, {"reduce_scatter"}, what="kinds of collectives of the second step")
    check_forms(ctx, model, unsharded=(), when="after the second backward")
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(2)), what="gradient")


@case("RSF-11", procs=(2, 4))
def an_int_that_does_not_divide_is_refused(ctx: Context) -> None:
    with check_raises(ValueError, containing="should be a factor of"):
        ctx.api.fully_shard(ctx.model(Chain()), mesh=ctx.mesh(), reshard_after_forward=3)


@case("SDT-01", procs=(1, 2, 4))
def state_dict_holds_the_sharded_parameters(ctx: Context) -> None:
    model = ctx.model(Chain(own=True))
    values = ctx.values(model)
    names = list(ctx.framework.state_dict(model))
    ctx.shard(model, units=UNITS)
    state = ctx.framework.state_dict(model)
    check_equal(list(state), names, what="names")
    check_equal([name for name, value in state.items() if not ctx.framework.is_sharded(value)], [], what="not sharded")
    check_arrays({name: ctx.framework.full(value) for name, value in state.items()}, values, what="value")


@case("SDT-02", procs=(1, 2, 4), reports=("pytorch/pytorch#144289",))
def state_dict_after_a_forward_that_keeps_the_parameters(ctx: Context) -> None:
    model = ctx.model(Chain(own=True))
    values = ctx.values(model)
    ctx.shard(model, units=UNITS, reshard_after_forward=False)
    with ctx.framework.no_grad():
        model(ctx.inputs(Chain(own=True)))
    state = ctx.framework.state_dict(model)
    check_equal([name for name, value in state.items() if not ctx.framework.is_sharded(value)], [], what="not sharded")
    check_arrays({name: ctx.framework.full(value) for name, value in state.items()}, values, what="value")


@case("SDT-03", procs=(1, 2, 4))
def a_loaded_state_dict_is_used(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 7, 5, 3), own=True)
    other = ctx.framework.model(recipe, seed=ctx.seed + 1)
    values: dict[str, Array] = ctx.values(other)
    truth = ctx.framework.array(other(ctx.inputs(recipe)))
    model = ctx.shard(ctx.model(recipe), units=UNITS)
    before = ctx.framework.array(model(ctx.inputs(recipe)))
    check(not np.array_equal(before, truth), "expected another output before loading, but it is the same")
    ctx.framework.load_state_dict(model, values)
    check_arrays(ctx.values(model), values, what="value after loading")
    check_arrays({"output": ctx.framework.array(model(ctx.inputs(recipe)))}, {"output": truth}, what="after loading")
