"""Several backwards before a step: what is communicated, and what it adds up to."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close, check_equal
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Branches, Chain, Probe
from hpcompat_conformance.run_context import Context, steps
from hpcompat_conformance.values import bfloat16_exact

UNITS = ("layers.0", "layers.1", "layers.2")


@case("ACC-01", procs=(2, 4))
def only_the_last_microbatch_reduces(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    with ctx.record() as first:
        ctx.train(model, ctx.inputs(Chain(), step=0))
    model.set_requires_gradient_sync(True)
    with ctx.record() as last:
        ctx.train(model, ctx.inputs(Chain(), step=1))
    gathers = "gather 0, gather 1, gather 2"
    check_equal(ctx.schedule(first), steps(gathers, over=ctx.world_size), what="with synchronisation off")
    expected = steps(f"{gathers} | reduce 2, reduce 1, reduce 0", over=ctx.world_size)
    check_equal(ctx.schedule(last), expected, what="with synchronisation on")


@case("ACC-01", procs=(2, 4))
def synchronisation_is_set_unit_by_unit(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    ctx.framework.child(model, "layers.1").set_requires_gradient_sync(True)
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(Chain()))
    expected = steps("gather 0, gather 1, gather 2 | reduce 1", over=ctx.world_size)
    check_equal(ctx.schedule(log), expected, what="collectives")


@case("ACC-02", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#437",))
def the_sum_of_four_microbatches(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(own=True), steps=range(4))
    for policy in (True, False):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        for step in range(4):
            model.set_requires_gradient_sync(step == 3)
            ctx.train(model, ctx.inputs(Chain(own=True), step=step))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("ACC-02", procs=(4,), reports=("mindspore-ai/hyper-parallel#437",))
def the_sum_of_four_microbatches_under_hsdp(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mesh=ctx.mesh_2d(2))
    for step in range(4):
        model.set_requires_gradient_sync(step == 3)
        ctx.train(model, ctx.inputs(Chain(), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(4)), what="gradient")


@case("ACC-03", procs=(1, 2, 4))
def no_gradient_appears_without_synchronisation(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    model.set_requires_gradient_sync(False)
    ctx.train(model, ctx.inputs(Chain()))
    present = [name for name, gradient in ctx.gradients(model).items() if gradient is not None]
    check_equal(present, [], what="parameters with a gradient")


@case("ACC-04", procs=(4,), reports=("pytorch/torchtitan#1929",))
def all_reduce_only_in_the_last_microbatch(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mesh=ctx.mesh_2d(2), reshard_after_forward=False)
    with ctx.record() as first:
        model.set_requires_all_reduce(False)
        for step in range(3):
            ctx.train(model, ctx.inputs(Chain(), step=step))
    present = [name for name, gradient in ctx.gradients(model).items() if gradient is not None]
    check_equal(present, [], what="parameters with a gradient before the all-reduce")
    with ctx.record() as last:
        model.set_requires_all_reduce(True)
        ctx.train(model, ctx.inputs(Chain(), step=3))
    gathers = "gather 0, gather 1, gather 2"
    expected = steps(f"{gathers} | reduce 2, reduce 1, reduce 0", over=2) * 3
    check_equal(ctx.schedule(first, shard_size=2), expected, what="with all-reduce off")
    expected = steps(f"{gathers} | reduce 2, all-reduce 2, reduce 1, all-reduce 1, reduce 0, all-reduce 0", over=2)
    check_equal(ctx.schedule(last, shard_size=2), expected, what="with all-reduce on")
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(4)), what="gradient")


@case("ACC-05", procs=(1, 2, 4))
def synchronised_backwards_add_up(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    for step in range(3):
        ctx.train(model, ctx.inputs(Chain(), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(3)), what="gradient")


@case("ACC-06", procs=(1, 2, 4), requires=("bfloat16",), reports=("pytorch/pytorch#194628",))
def sums_that_the_parameter_dtype_cannot_hold(ctx: Context) -> None:
    microbatches = (0,) * 15 + (1,)
    truth = ctx.true_gradients(Probe(), steps=microbatches)
    # Each microbatch's gradient is exact in bfloat16, their sum must not be.
    assert not bfloat16_exact(ctx.true_gradients(Probe(), steps=microbatches, divide_by=1)["layers.0.weight"])
    model = ctx.shard(ctx.model(Probe()), mp_policy=ctx.policy(param_dtype="bfloat16", reduce_dtype="float32"))
    for index, microbatch in enumerate(microbatches):
        model.set_requires_gradient_sync(index == len(microbatches) - 1)
        ctx.train(model, ctx.inputs(Probe(), step=microbatch))
    check_arrays(ctx.gradients(model), truth, what="gradient")


@case("ACC-07", procs=(1, 2, 4), requires=("bfloat16",))
def first_gradient_in_the_last_microbatch(ctx: Context) -> None:
    uses = ((1,), (1,), (1, 2))
    policy = ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")
    model = ctx.shard(ctx.model(Branches()), mp_policy=policy)
    truth: dict[str, Array] = {}
    for step, use in enumerate(uses):
        model.set_requires_gradient_sync(step == len(uses) - 1)
        ctx.train(model, ctx.inputs(Branches(), step=step), use=use)
        part = ctx.true_gradients(Branches(), steps=(step,), use=use)
        truth |= {name: truth.get(name, np.float32(0)) + gradient for name, gradient in part.items()}
    check_close(ctx.gradients(model), truth, what="gradient", tolerance=2**-6)


@case("ACC-08", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#437",))
def three_steps_of_four_microbatches(ctx: Context) -> None:
    truth, model = ctx.model(Chain(own=True)), ctx.shard(ctx.model(Chain(own=True)), units=UNITS)
    optimizers = [ctx.framework.optimizer(m, kind="adamw", lr=0.05) for m in (truth, model)]
    start = ctx.values(truth)
    for step in range(3):
        for microbatch in range(4 * step, 4 * step + 4):
            for rank in range(ctx.world_size):
                inputs = ctx.inputs(Chain(own=True), step=microbatch, rank=rank)
                ctx.train(truth, inputs, scale=1 / ctx.world_size)
            model.set_requires_gradient_sync(microbatch == 4 * step + 3)
            ctx.train(model, ctx.inputs(Chain(own=True), step=microbatch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_close(ctx.values(model), ctx.values(truth), what="parameter", tolerance=1e-6)
    moved = [name for name, value in ctx.values(truth).items() if not np.array_equal(value, start[name])]
    check(len(moved) == len(start), f"expected training to move every parameter, but it moved only {moved}")


@case("ACC-08", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#437",))
def two_steps_that_accumulate_in_a_reduce_dtype(ctx: Context) -> None:
    # A wider one, so that the numbers stay exact.
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mp_policy=ctx.policy(reduce_dtype="float64"))
    for step in range(2):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            ctx.train(model, ctx.inputs(Chain(), step=2 * step + microbatch))
        truth = ctx.true_gradients(Chain(), steps=range(2 * step + 2))
        check_arrays(ctx.gradients(model), truth, what=f"gradient after step {step}")


@case("ACC-09", procs=(1, 2, 4), reports=("meta-pytorch/torchtune#2172",))
def losses_weighted_by_tokens(ctx: Context) -> None:
    # Rank r has r + 1 rows that count, of as many as there are.
    rows = [2, 1, 2, 2][: ctx.world_size]
    total = sum(rows)
    truth = ctx.true_gradients(
        Chain(), divide_by=total, train=lambda model, inputs, rank: ctx.train(model, inputs[: rows[rank]])
    )
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    ctx.train(model, ctx.inputs(Chain())[: rows[ctx.rank]], scale=ctx.world_size / total)
    check_close(ctx.gradients(model), truth, what="gradient", tolerance=2.0**-20)


@case("ACC-09", procs=(1, 2, 4), reports=("pytorch/pytorch#144352",))
def the_mean_over_microbatches(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain(), steps=range(4), divide_by=4 * ctx.world_size)
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    for step in range(4):
        model.set_requires_gradient_sync(step == 3)
        ctx.train(model, ctx.inputs(Chain(), step=step), scale=0.25)
    check_arrays(ctx.gradients(model), truth, what="gradient")


@case("ACC-10", procs=(1, 2, 4), reports=("mindspore-ai/hyper-parallel#324",))
def a_loss_in_chunks(ctx: Context) -> None:
    truth = ctx.true_gradients(Chain())
    for policy in (True, False):
        model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=policy)
        first, second, head = (ctx.framework.child(model, path) for path in UNITS)
        model.set_is_last_backward(False)
        hidden = relu(ctx, second(relu(ctx, first(ctx.inputs(Chain())))))
        boundary = ctx.framework.array(hidden)
        pieces: list[Array] = []
        for row in range(len(boundary)):
            chunk = ctx.framework.tensor(boundary[row : row + 1], requires_grad=True)
            ctx.framework.on_gradient(chunk, lambda grad, to=pieces: to.append(ctx.framework.array(grad)))
            ctx.framework.backward(ctx.framework.loss(head(chunk)))
        model.set_is_last_backward(True)
        ctx.framework.backward(hidden, ctx.framework.tensor(np.concatenate(pieces)))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with reshard_after_forward={policy}")


@case("ACC-11", procs=(2, 4), requires=("FSDPModule.no_sync",), reports=("pytorch/torchtitan#3724",))
def a_block_without_synchronisation(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    ctx.framework.child(model, "layers.1").set_requires_gradient_sync(False)
    with ctx.record() as inside, model.no_sync():
        ctx.train(model, ctx.inputs(Chain(), step=0))
    with suppress(LookupError), model.no_sync():
        raise LookupError("a batch that is not there")
    with ctx.record() as after:
        ctx.train(model, ctx.inputs(Chain(), step=1))
    check_equal(ctx.schedule(inside), steps("gather 0, gather 1, gather 2", over=ctx.world_size), what="in the block")
    expected = steps("gather 0, gather 1, gather 2 | reduce 2, reduce 0", over=ctx.world_size)
    check_equal(ctx.schedule(after), expected, what="after the blocks")


@case("ACC-11", procs=(4,), requires=("FSDPModule.no_sync",), reports=("pytorch/torchtitan#3724",))
def a_block_within_microbatches_without_all_reduce(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mesh=ctx.mesh_2d(2), reshard_after_forward=False)
    model.set_requires_all_reduce(False)
    with model.no_sync():
        ctx.train(model, ctx.inputs(Chain(), step=0))
    with ctx.record() as after:
        ctx.train(model, ctx.inputs(Chain(), step=1))
    expected = steps("gather 0, gather 1, gather 2 | reduce 2, reduce 1, reduce 0", over=2)
    check_equal(ctx.schedule(after, shard_size=2), expected, what="after the block")
    model.set_requires_all_reduce(True)
    ctx.train(model, ctx.inputs(Chain(), step=2))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(3)), what="gradient")


@case("ACC-11", procs=(1, 2, 4), requires=("FSDPModule.no_sync",), reports=("pytorch/torchtitan#3724",))
def the_sum_over_a_block_and_a_backward(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    with model.no_sync():
        for step in range(2):
            ctx.train(model, ctx.inputs(Chain(), step=step))
    present = [name for name, gradient in ctx.gradients(model).items() if gradient is not None]
    check_equal(present, [], what="parameters with a gradient after the block")
    ctx.train(model, ctx.inputs(Chain(), step=2))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(3)), what="gradient")


def relu(ctx: Context, tensor: Any) -> Any:
    """By a product, which every framework has."""
    return tensor * ctx.framework.tensor((ctx.framework.array(tensor) > 0).astype(np.float32))
