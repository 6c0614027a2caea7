"""A model as a stage of a pipeline calls it: on an input that needs a gradient, with several microbatches under way."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
STAGE = Chain(own=True)


def received(ctx: Context, *, step: int) -> Any:
    """The input of a later stage: an activation whose gradient goes back to the stage before."""
    return ctx.framework.tensor(ctx.framework.array(ctx.inputs(STAGE, step=step)), requires_grad=True)


@case("STG-01", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#267",))
def gradients_of_the_root_step_by_step(ctx: Context) -> None:
    for policy in (False, True):
        model = ctx.shard(ctx.model(STAGE), units=UNITS, reshard_after_forward=policy)
        for step in range(3):
            ctx.framework.zero_grad(model)
            ctx.train(model, received(ctx, step=step))
            truth = ctx.true_gradients(STAGE, steps=(step,))
            check_arrays(ctx.gradients(model), truth, what=f"gradient in step {step}, {policy} after forward,")


@case("STG-01", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#267",))
def no_gradients_of_the_step_before(ctx: Context) -> None:
    before, truth = (ctx.true_gradients(STAGE, steps=(step,)) for step in range(2))
    model = ctx.shard(ctx.model(STAGE), units=UNITS, reshard_after_forward=False)
    for step in range(2):
        ctx.framework.zero_grad(model)
        ctx.train(model, received(ctx, step=step))
    found = ctx.gradients(model)
    stale = [name for name, gradient in found.items() if np.array_equal(gradient, before[name])]
    check_equal(stale, [], what="parameters with the gradient of the step before")
    check_arrays(found, truth, what="gradient")


@case("STG-02", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#267",))
def backwards_of_four_microbatches_that_keep_the_parameters(ctx: Context) -> None:
    check_microbatches(ctx, frees=False)


@case("STG-02", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#267",))
def backwards_of_four_microbatches_that_free_the_parameters(ctx: Context) -> None:
    check_microbatches(ctx, frees=True)


def check_microbatches(ctx: Context, *, frees: bool) -> None:
    """Two steps. Backward frees the parameters after each microbatch, or only after the last, as torch's schedules set
    it."""
    model = ctx.shard(ctx.model(STAGE), units=UNITS, reshard_after_forward=False)
    for first in (0, 4):
        ctx.framework.zero_grad(model)
        losses = [ctx.framework.loss(model(received(ctx, step=first + number))) for number in range(4)]
        for number, loss in enumerate(losses):
            model.set_is_last_backward(number == 3)
            model.set_reshard_after_backward(frees or number == 3)
            model.set_requires_gradient_sync(number == 3)
            ctx.framework.backward(loss)
        truth = ctx.true_gradients(STAGE, steps=range(first, first + 4))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of microbatches {first} to {first + 3}")
