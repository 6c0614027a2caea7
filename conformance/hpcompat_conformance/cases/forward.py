"""What goes into forward and what comes out of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Branches, Chain, Packed, Probe, Tied
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
POLICIES = (True, False)


def train_packed(ctx: Context, model: Any, inputs: Any) -> None:
    """A loss of both outputs, however they are packed."""
    output = model(inputs)
    if isinstance(output, dict):
        last, (number, (first,)) = output["last"], output["more"]
        check_equal(number, 3, what="what is no tensor in the output")
    else:
        last, first = output.last, output.first
    ctx.framework.backward(ctx.framework.loss(last) + ctx.framework.loss(first))


def true_gradients(ctx: Context, recipe: Packed) -> dict[str, Array]:
    """Of the unsharded model over all ranks."""
    return ctx.true_gradients(recipe, train=lambda model, inputs, rank: train_packed(ctx, model, inputs))


@case("FWD-01", procs=(1, 2, 4))
def nested_outputs(ctx: Context) -> None:
    truth = true_gradients(ctx, Packed())
    for policy in POLICIES:
        for units in ((), UNITS[:2]):
            model = ctx.shard(ctx.model(Packed()), units=units, reshard_after_forward=policy)
            for _ in range(2):
                ctx.framework.zero_grad(model)
                train_packed(ctx, model, ctx.inputs(Packed()))
                what = f"gradient with reshard_after_forward={policy} and units {units}"
                check_arrays(ctx.gradients(model), truth, what=what)


@case("FWD-02", procs=(1, 2, 4), reports=("InternLM/xtuner#1677",))
def outputs_in_an_object(ctx: Context) -> None:
    recipe = Packed(form="object")
    truth = true_gradients(ctx, recipe)
    for policy in POLICIES:
        model = ctx.shard(ctx.model(recipe), reshard_after_forward=policy)
        try:
            train_packed(ctx, model, ctx.inputs(recipe))
        except Exception as error:
            check(str(error) != "", "expected an error that says something, but it is empty")
        else:
            check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("FWD-03", procs=(1, 2, 4))
def the_bits_of_the_output(ctx: Context) -> None:
    for recipe in (Chain(own=True), Branches(), Tied(), Chain(sizes=(4, 7, 5, 1))):
        inputs = ctx.inputs(recipe, rough=not isinstance(recipe, Tied))
        truth = ctx.framework.array(ctx.model(recipe)(inputs))
        model = ctx.shard(ctx.model(recipe))
        for _ in range(2):
            found = ctx.framework.array(model(inputs))
            check_arrays({"output": found}, {"output": truth}, what=f"of {recipe}:")


@case("FWD-04", procs=(1, 2, 4))
def a_submodule_alone(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 4, 4, 4))
    for policy in POLICIES:
        model = ctx.shard(ctx.model(recipe), units=UNITS, reshard_after_forward=policy)
        ctx.train(model, ctx.inputs(recipe))
        ctx.framework.zero_grad(model)
        alone, truth = ctx.framework.child(model, "layers.1"), ctx.framework.child(ctx.model(recipe), "layers.1")
        with ctx.framework.no_grad():
            outputs = [ctx.framework.array(module(ctx.inputs(recipe))) for module in (alone, truth)]
        check_arrays({"output": outputs[0]}, {"output": outputs[1]}, what="of the submodule alone")
        ctx.train(alone, ctx.inputs(recipe))
        expected = ctx.true_gradients(
            recipe, train=lambda model, inputs, rank: ctx.train(ctx.framework.child(model, "layers.1"), inputs)
        )
        check_arrays(ctx.present_gradients(model), expected, what="gradient of the submodule alone")
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(recipe))
        check_arrays(ctx.gradients(model), ctx.true_gradients(recipe), what="gradient of the next step")


@case("FWD-05", procs=(1, 2))
def arguments(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Branches()), units=UNITS)
    for use in ((1,), (2, 1)):
        truth = ctx.framework.array(ctx.model(Branches())(ctx.inputs(Branches()), use))
        for found in (model(ctx.inputs(Branches()), use), model(ctx.inputs(Branches()), use=use)):
            check_arrays({"output": ctx.framework.array(found)}, {"output": truth}, what=f"with {use}")
    probe = ctx.shard(ctx.model(Probe()))
    probe(ctx.inputs(Probe()), None)
    check_equal("side" in probe.seen, False, what="whether None arrived as a tensor")
    probe(ctx.inputs(Probe()), side=ctx.framework.tensor(np.array([1, 2], dtype=np.int32)))
    check_equal(probe.seen["side"], "int32", what="dtype of an argument by name")
