"""The bits of training: optimizer steps from given gradients, and long runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.adamw import AdamW, bfloat16, wide_step
from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
WIDE = Chain(sizes=(64, 128))  # 8192 weights
UNEVEN = Chain(sizes=(9, 67))
BF16 = ("bfloat16",)


def rough_values(ctx: Context, model: Any, *, size: float, key: int) -> dict[str, Array]:
    """A bfloat16 number for each element of each parameter; the same on all ranks."""
    random = np.random.default_rng([ctx.seed, key])
    shapes = {name: ctx.framework.shape(p) for name, p in ctx.framework.parameters(model).items()}
    return {name: bfloat16(random.normal(0, size, shape).astype(np.float32)) for name, shape in shapes.items()}


def rough_gradients(ctx: Context, model: Any, *, step: int) -> dict[str, Array]:
    """Likewise, of all sizes from 1e-9 to 1."""
    random = np.random.default_rng([ctx.seed, 7, step])
    ones = rough_values(ctx, model, size=1.0, key=100 + step)
    return {
        name: bfloat16((one * 10.0 ** random.uniform(-9, 0, one.shape)).astype(np.float32))
        for name, one in ones.items()
    }


def rough_model(ctx: Context, recipe: Chain, *, dtype: str) -> Any:
    """With weights that use all bits of bfloat16."""
    model = ctx.model(recipe, dtype=dtype)
    values = rough_values(ctx, model, size=0.02, key=1)
    for name, parameter in ctx.framework.parameters(model).items():
        ctx.framework.set_value(parameter, values[name])
    return model


def take_step(ctx: Context, model: Any, optimizer: Any, *, gradients: dict[str, Array]) -> None:
    """Step from these gradients."""
    for name, parameter in ctx.framework.parameters(model).items():
        ctx.framework.set_gradient(parameter, gradients[name])
    ctx.optimizer_step(optimizer)


def everything(ctx: Context, model: Any, optimizer: Any) -> dict[str, Array]:
    """Values and optimizer states."""
    return {f"value of {name}": value for name, value in ctx.values(model).items()} | ctx.states(model, optimizer)


def check_against_unsharded(ctx: Context, recipe: Chain, *, dtype: str, num_steps: int, multi_tensor: bool) -> None:
    """After each step, values and states on every mesh must have the bits of the unsharded model's."""
    truth = rough_model(ctx, recipe, dtype=dtype)
    models = {
        num_replicas: ctx.shard(rough_model(ctx, recipe, dtype=dtype), mesh=ctx.mesh_2d(num_replicas))
        for num_replicas in (1, 2, 4)
        if ctx.world_size % num_replicas == 0
    }
    optimizers = {
        key: ctx.framework.optimizer(model, kind="adamw", lr=1e-3, multi_tensor=multi_tensor)
        for key, model in {0: truth, **models}.items()
    }
    for step in range(num_steps):
        gradients = rough_gradients(ctx, truth, step=step)
        take_step(ctx, truth, optimizers[0], gradients=gradients)
        expected = everything(ctx, truth, optimizers[0])
        for num_replicas, model in models.items():
            take_step(ctx, model, optimizers[num_replicas], gradients=gradients)
            what = f"{num_replicas} replicas, step {step}:"
            check_arrays(everything(ctx, model, optimizers[num_replicas]), expected, what=what)


@case("NUM-01", procs=(1, 2, 4), requires=BF16, reports=("mindspore-ai/hyper-parallel#700",))
def twenty_steps_in_bfloat16(ctx: Context) -> None:
    for multi_tensor in (False, True):
        check_against_unsharded(ctx, WIDE, dtype="bfloat16", num_steps=20, multi_tensor=multi_tensor)


@case("NUM-01", procs=(2, 4), requires=BF16, reports=("mindspore-ai/hyper-parallel#700",))
def uneven_rows_in_bfloat16(ctx: Context) -> None:
    check_against_unsharded(ctx, UNEVEN, dtype="bfloat16", num_steps=3, multi_tensor=True)


@case("NUM-02", procs=(1, 2, 4), requires=BF16, reports=("mindspore-ai/hyper-parallel#700",))
def each_operation_is_rounded(ctx: Context) -> None:
    model = rough_model(ctx, WIDE, dtype="bfloat16")
    values = ctx.values(model)
    references = {name: AdamW(value, "bfloat16", lr=1e-3) for name, value in values.items()}
    rounded_late = {name: AdamW(value, "bfloat16", lr=1e-3) for name, value in values.items()}
    optimizer_of = ctx.shard(model)
    optimizer = ctx.framework.optimizer(optimizer_of, kind="adamw", lr=1e-3, multi_tensor=True)
    for step in range(20):
        gradients = rough_gradients(ctx, model, step=step)
        take_step(ctx, model, optimizer, gradients=gradients)
        for name, gradient in gradients.items():
            references[name].step(gradient)
            wide_step(rounded_late[name], gradient)
        expected: dict[str, Array] = {}
        for name, reference in references.items():
            expected |= {f"value of {name}": reference.value, f"exp_avg of {name}": reference.exp_avg}
            expected |= {f"exp_avg_sq of {name}": reference.exp_avg_sq}
        found = everything(ctx, model, optimizer)
        check_arrays({name: found[name] for name in expected}, expected, what=f"step {step}:")
    differs = any((rounded_late[name].value != references[name].value).any() for name in references)
    assert differs, "expected rounding at the end to give other bits: the case could not tell the two apart"


@case("NUM-03", procs=(1, 2, 4), requires=BF16, reports=("mindspore-ai/hyper-parallel#700",))
def an_update_that_is_too_small(ctx: Context) -> None:
    for lr, moves in ((1e-5, False), (1e-3, True)):
        model = ctx.model(WIDE, dtype="bfloat16")
        for parameter in ctx.framework.parameters(model).values():
            # Between 2**-6 and 2**-5, where two numbers are 2**-13 apart: 0.000122.
            start = bfloat16(np.full(ctx.framework.shape(parameter), 0.0201, dtype=np.float32))
            ctx.framework.set_value(parameter, start)
        before = ctx.values(model)
        ctx.shard(model)
        optimizer = ctx.framework.optimizer(model, kind="adamw", lr=lr, weight_decay=0.0, multi_tensor=True)
        tiny = {name: bfloat16(np.full(value.shape, -1.56e-8, dtype=np.float32)) for name, value in before.items()}
        take_step(ctx, model, optimizer, gradients=tiny)
        after = ctx.values(model)
        if moves:
            check(all((after[name] > before[name]).all() for name in before), f"expected lr={lr} to move all elements")
        else:
            check_arrays(after, before, what=f"value after a step with lr={lr}")


@case("NUM-04", procs=(1, 2))
def two_steps_in_closed_form(ctx: Context) -> None:
    lr, decay, (first, second) = 0.125, 0.25, (0.5, 0.75)
    model = ctx.shard(rough_model(ctx, WIDE, dtype="float32"))
    options = {"weight_decay": decay, "betas": (first, second), "eps": 1e-3}
    optimizer = ctx.framework.optimizer(model, kind="adamw", lr=lr, **options)
    truth = {name: value.astype(np.float64) for name, value in ctx.values(model).items()}
    average = {name: np.zeros(value.shape) for name, value in truth.items()}
    square = {name: np.zeros(value.shape) for name, value in truth.items()}
    for step in (1, 2):
        gradients = rough_gradients(ctx, model, step=step)
        take_step(ctx, model, optimizer, gradients=gradients)
        for name, gradient in gradients.items():
            average[name] = first * average[name] + (1 - first) * gradient
            square[name] = second * square[name] + (1 - second) * gradient.astype(np.float64) ** 2
            corrected = average[name] / (1 - first**step)
            root = np.sqrt(square[name] / (1 - second**step)) + 1e-3
            truth[name] = truth[name] * (1 - lr * decay) - lr * corrected / root
        check_close(ctx.values(model), truth, what=f"value after step {step}", tolerance=1e-6)


@case("NUM-05", procs=(1, 2), reports=("mindspore-ai/hyper-parallel#278",))
def a_hundred_steps(ctx: Context) -> None:
    truth, model = ctx.model(RECIPE), ctx.shard(ctx.model(RECIPE), units=UNITS)
    optimizers = [ctx.framework.optimizer(m, kind="sgd", lr=2.0**-14) for m in (truth, model)]
    start = ctx.values(truth)
    for step in range(100):
        for rank in range(ctx.world_size):
            ctx.train(truth, ctx.inputs(RECIPE, step=step, rank=rank), scale=1 / ctx.world_size)
        ctx.train(model, ctx.inputs(RECIPE, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_close(ctx.values(model), ctx.values(truth), what="value", tolerance=1e-5)
    moved = {name: float(np.abs(value - start[name]).max()) for name, value in ctx.values(truth).items()}
    check(min(moved.values()) > 1e-3, f"expected training to move every parameter, but the furthest went {moved}")


@case("NUM-06", procs=(1, 2, 4))
def two_runs(ctx: Context) -> None:
    runs = [trained(ctx, ctx.shard(ctx.model(RECIPE), units=UNITS), RECIPE) for _ in range(2)]
    check_arrays(runs[1], runs[0], what="in the second run:")


@case("NUM-07", procs=(1, 2, 4), reports=("Lightning-AI/pytorch-lightning#21812",))
def steps_in_float32(ctx: Context) -> None:
    for recipe in (WIDE, UNEVEN):
        for multi_tensor in (False, True):
            check_against_unsharded(ctx, recipe, dtype="float32", num_steps=3, multi_tensor=multi_tensor)
