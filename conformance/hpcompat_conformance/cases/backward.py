"""Where backward begins, how far it gets, and how often it runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_array, check_arrays, check_equal
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Chain, Packed
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
POLICIES = (True, False)


def gradient_of_input(ctx: Context, model: Any) -> Array:
    """Of this rank's batch."""
    inputs = ctx.framework.tensor(ctx.framework.array(ctx.inputs(RECIPE)), requires_grad=True)
    seen: list[Array] = []
    ctx.framework.on_gradient(inputs, lambda gradient: seen.append(ctx.framework.array(gradient)))
    ctx.train(model, inputs)
    check_equal(len(seen), 1, what="gradients of the input")
    return seen[0]


@case("BWD-01", procs=(1, 2, 4))
def an_input_that_needs_a_gradient(ctx: Context) -> None:
    expected, truth = gradient_of_input(ctx, ctx.model(RECIPE)), ctx.true_gradients(RECIPE)
    for policy in POLICIES:
        for units in ((), UNITS):
            model = ctx.shard(ctx.model(RECIPE), units=units, reshard_after_forward=policy)
            check_array(gradient_of_input(ctx, model), expected, what="gradient of the input")
            check_arrays(ctx.gradients(model), truth, what="gradient beside that of the input")


@case("BWD-02", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#439",))
def from_a_gradient(ctx: Context) -> None:
    def train(model: Any, inputs: Any, rank: int) -> None:
        output = model(inputs)
        weights = np.arange(output.shape[0] * output.shape[1], dtype=np.float32).reshape(output.shape) - rank
        ctx.framework.backward(output, ctx.framework.tensor(weights))

    truth = ctx.true_gradients(RECIPE, train=train)
    for policy in POLICIES:
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, reshard_after_forward=policy)
        train(model, ctx.inputs(RECIPE), ctx.rank)
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("BWD-03", procs=(1, 2, 4))
def one_of_two_outputs(ctx: Context) -> None:
    for which in ("last", "first"):

        def train(model: Any, inputs: Any, rank: int, which: str = which) -> None:
            output = model(inputs)
            ctx.framework.backward(ctx.framework.loss(output["last"] if which == "last" else output["more"][1][0]))

        truth = ctx.true_gradients(Packed(), train=train)
        for policy in POLICIES:
            for units in ((), UNITS[:2]):
                model = ctx.shard(ctx.model(Packed()), units=units, reshard_after_forward=policy)
                for _ in range(2):
                    ctx.framework.zero_grad(model)
                    train(model, ctx.inputs(Packed()), ctx.rank)
                    what = f"gradient from {which} with reshard_after_forward={policy} and units {units}"
                    check_arrays(ctx.present_gradients(model), truth, what=what)
                unsharded = [name for name, is_sharded in ctx.sharded(model).items() if not is_sharded]
                check_equal(unsharded, [], what=f"parameters in full after a backward from {which}")


@case("BWD-04", procs=(1, 2, 4))
def a_forward_that_no_backward_reaches(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE)
    for policy in POLICIES:
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, reshard_after_forward=policy)
        for step in range(3):
            ctx.framework.zero_grad(model)
            if step == 1:
                model(ctx.inputs(RECIPE, step=7))
            ctx.train(model, ctx.inputs(RECIPE))
            what = f"of step {step} with reshard_after_forward={policy}"
            check_arrays(ctx.gradients(model), truth, what=f"gradient {what}")
            unsharded = [name for name, is_sharded in ctx.sharded(model).items() if not is_sharded]
            check_equal(unsharded, [], what=f"parameters in full after backward {what}")


@case("BWD-05", procs=(1, 2, 4))
def a_backward_for_each_forward(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE, steps=range(3))
    for policy in POLICIES:
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            model = ctx.shard(ctx.model(RECIPE), units=UNITS, reshard_after_forward=policy)
            losses = [ctx.framework.loss(model(ctx.inputs(RECIPE, step=step))) for step in range(3)]
            for place in order:
                ctx.framework.backward(losses[place])
            what = f"gradient with reshard_after_forward={policy} and backwards in order {order}"
            check_arrays(ctx.gradients(model), truth, what=what)


@case("BWD-06", procs=(1, 2, 4), requires=("value_and_grad", "full_tensor"))
def a_function_and_its_gradients(ctx: Context) -> None:
    for policy in POLICIES:
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, reshard_after_forward=policy)
        parameters = ctx.framework.parameters(model)
        function = ctx.api.value_and_grad(
            lambda inputs, model=model: ctx.framework.loss(model(inputs)), list(parameters.values())
        )
        for step in range(2):
            inputs = ctx.inputs(RECIPE, step=step)
            value, gradients = function(inputs)
            expected = ctx.framework.array(ctx.framework.loss(ctx.model(RECIPE)(inputs)))
            check_array(ctx.framework.array(value), expected, what=f"value of step {step}")
            whole = {
                name: ctx.framework.array(ctx.api.full_tensor(parameter, gradient))
                for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
            }
            what = f"gradient of step {step} with reshard_after_forward={policy}"
            check_arrays(whole, ctx.true_gradients(RECIPE, steps=(step,)), what=what)
