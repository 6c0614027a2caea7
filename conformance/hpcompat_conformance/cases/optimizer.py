"""Optimizers over sharded parameters: what they step over, what they keep, what clears gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Branches, Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.two_meshes import shard_on_two_meshes

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
MESHES = ("ShardPlacementResult", "FSDPMeshInfo")


def take_steps(ctx: Context, truth: Any, model: Any, *, multi_tensor: bool, what: str, num_steps: int = 2) -> None:
    """AdamW from the same given gradients on both: after each step the same bits."""
    models = (truth, model)
    optimizers = [ctx.framework.optimizer(m, kind="adamw", lr=0.125, multi_tensor=multi_tensor) for m in models]
    for step in range(num_steps):
        gradients = given_gradients(ctx, truth, step=step)
        for trained, optimizer in zip(models, optimizers, strict=True):
            for name, parameter in ctx.framework.parameters(trained).items():
                ctx.framework.set_gradient(parameter, gradients[name])
            ctx.optimizer_step(optimizer)
        check_arrays(ctx.values(model), ctx.values(truth), what=f"value after step {step} {what}")
        states = [ctx.states(m, optimizer) for m, optimizer in zip(models, optimizers, strict=True)]
        check_arrays(states[1], states[0], what=f"state after step {step} {what}:")


def given_gradients(ctx: Context, model: Any, *, step: int) -> dict[str, Array]:
    """Integers that are the same on all ranks."""
    random = np.random.default_rng([ctx.seed, 11, step])
    shapes = {name: ctx.framework.shape(p) for name, p in ctx.framework.parameters(model).items()}
    return {name: random.integers(1, 9, shape).astype(np.float32) for name, shape in shapes.items()}


def with_ignored_biases(ctx: Context, **options: Any) -> Any:
    """One unit; the biases are left out of it."""
    model = ctx.model(RECIPE)
    parameters = ctx.framework.parameters(model)
    ignored = {parameter for name, parameter in parameters.items() if name.endswith("bias")}
    return ctx.shard(model, ignored_params=ignored, **options)


@case("OPT-01", procs=(1, 2, 4), reports=("pytorch/pytorch#183207", "cornstarch-org/Cornstarch#87"))
def sharded_and_ignored_parameters(ctx: Context) -> None:
    take_steps(ctx, ctx.model(RECIPE), with_ignored_biases(ctx), multi_tensor=False, what="one by one")


@case("OPT-01", procs=(1, 2, 4), reports=("pytorch/pytorch#183207", "cornstarch-org/Cornstarch#87"))
def sharded_and_ignored_parameters_many_at_once(ctx: Context) -> None:
    take_steps(ctx, ctx.model(RECIPE), with_ignored_biases(ctx), multi_tensor=True, what="many at once")


@case("OPT-01", procs=(1, 2, 4), requires=("fully_shard.replicate_params",), reports=("cornstarch-org/Cornstarch#87",))
def sharded_and_replicated_parameters(ctx: Context) -> None:
    for multi_tensor in (False, True):
        model = ctx.model(RECIPE)
        parameters = ctx.framework.parameters(model)
        whole = {parameter for name, parameter in parameters.items() if name.endswith("bias")}
        ctx.shard(model, replicate_params=whole)
        what = f"with multi_tensor={multi_tensor}"
        take_steps(ctx, ctx.model(RECIPE), model, multi_tensor=multi_tensor, what=what)


@case("OPT-02", procs=(2, 4), requires=MESHES, reports=("pytorch/pytorch#126670", "pytorch/pytorch#140514"))
def parameters_on_two_meshes(ctx: Context) -> None:
    take_steps(
        ctx, ctx.model(RECIPE), shard_on_two_meshes(ctx, ctx.model(RECIPE)), multi_tensor=False, what="one by one"
    )


@case("OPT-02", procs=(2, 4), requires=MESHES, reports=("pytorch/pytorch#126670", "pytorch/pytorch#140514"))
def parameters_on_two_meshes_many_at_once(ctx: Context) -> None:
    take_steps(
        ctx, ctx.model(RECIPE), shard_on_two_meshes(ctx, ctx.model(RECIPE)), multi_tensor=True, what="many at once"
    )


@case("OPT-02", procs=(4,), reports=("pytorch/pytorch#140514",))
def units_of_fsdp_and_hsdp_many_at_once(ctx: Context) -> None:
    model = ctx.model(RECIPE)
    ctx.api.fully_shard(ctx.framework.child(model, "layers.0"), mesh=ctx.mesh_2d(2))
    ctx.shard(model)
    take_steps(ctx, ctx.model(RECIPE), model, multi_tensor=True, what="with a unit of HSDP")


@case("OPT-03", procs=(1, 2, 4), requires=("bfloat16",), reports=("huggingface/accelerate#3905",))
def parameters_of_two_dtypes(ctx: Context) -> None:
    for num_replicas in (size for size in (1, 2) if ctx.world_size % size == 0):
        models = [ctx.model(RECIPE) for _ in range(2)]
        for model in models:
            ctx.framework.cast(ctx.framework.child(model, "layers.1"), "bfloat16")
        ctx.shard(models[1], units=UNITS, mesh=ctx.mesh_2d(num_replicas))
        for multi_tensor in (False, True):
            take_steps(ctx, *models, multi_tensor=multi_tensor, what=f"with {num_replicas} replicas", num_steps=1)
        found = {n: ctx.framework.dtype_of(p) for n, p in ctx.framework.parameters(models[1]).items()}
        narrow = {name for name, dtype in found.items() if dtype == "bfloat16"}
        check_equal(narrow, {"layers.1.weight", "layers.1.bias"}, what="parameters in bfloat16")


@case("OPT-04", procs=(1, 2, 4), requires=("bfloat16",), reports=("areal-project/AReaL#1292",))
def dtypes_and_shapes_of_states(ctx: Context) -> None:
    for dtype in ("float32", "bfloat16"):
        for param_dtype in (None, "bfloat16"):
            policy = ctx.policy(param_dtype=param_dtype, reduce_dtype="float32")
            model = ctx.shard(ctx.model(Chain(sizes=(4, 7, 5)), dtype=dtype), mp_policy=policy)
            optimizer = ctx.framework.optimizer(model, kind="adamw", lr=0.125)
            output = model(ctx.framework.tensor(ctx.framework.array(ctx.inputs(RECIPE)), dtype=param_dtype or dtype))
            ctx.framework.backward(ctx.framework.loss(output))
            ctx.optimizer_step(optimizer)
            for name, parameter in ctx.framework.parameters(model).items():
                what = f"{name} of {dtype} with {policy}"
                gradient = ctx.framework.gradient(parameter)
                check_equal(ctx.framework.dtype_of(gradient), dtype, what=f"dtype of the gradient of {what}")
                state = ctx.framework.optimizer_state(optimizer, parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    check_equal(ctx.framework.dtype_of(state[key]), dtype, what=f"dtype of {key} of {what}")
                    shapes = [ctx.framework.local(tensor).shape for tensor in (state[key], parameter)]
                    check_equal(shapes[0], shapes[1], what=f"shape of this rank's part of {key} of {what}")


@contextmanager
def said() -> Iterator[list[str]]:
    """What is said by warnings and by warnings in the log inside the block."""
    words: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield words
        words += [str(warning.message) for warning in caught]
    finally:
        logging.getLogger().removeHandler(handler)


@case("OPT-05", procs=(1, 2), requires=("bfloat16",), reports=("areal-project/AReaL#1292",))
def a_warning_for_averages_in_bfloat16(ctx: Context) -> None:
    for dtype, expected in (("float32", 0), ("bfloat16", 1)):
        model = ctx.shard(ctx.model(RECIPE, dtype=dtype))
        optimizer = ctx.framework.optimizer(model, kind="adamw", lr=0.125)
        with said() as words:
            for step in range(2):
                for name, gradient in given_gradients(ctx, model, step=step).items():
                    ctx.framework.set_gradient(ctx.framework.parameters(model)[name], gradient)
                ctx.optimizer_step(optimizer)
        found = [text for text in words if "bfloat16" in text]
        check_equal(len(found), expected, what=f"warnings in two steps of {dtype} parameters, {found}")


@case("OPT-06", procs=(1, 2, 4))
def a_parameter_without_a_gradient(ctx: Context) -> None:
    for multi_tensor in (False, True):
        model = ctx.shard(ctx.model(Branches()), units=UNITS)
        before = ctx.values(model)
        optimizer = ctx.framework.optimizer(model, kind="adamw", lr=0.125, multi_tensor=multi_tensor)
        ctx.optimizer_step(optimizer)
        check_arrays(ctx.values(model), before, what="value after a step without any gradient")
        ctx.train(model, ctx.inputs(Branches()), use=(2,))
        ctx.optimizer_step(optimizer)
        after, states = ctx.values(model), ctx.states(model, optimizer)
        kept = {name: value for name, value in before.items() if name.startswith("layers.1.")}
        check_arrays({name: after[name] for name in kept}, kept, what="value without a gradient")
        check_equal([name for name in states if " layers.1." in name], [], what="states without a gradient")
        moved = any((after[name] != before[name]).any() for name in before if name.startswith("layers.2."))
        check(moved, "expected the step to move layers.2, but it did not")


@case("OPT-07", procs=(1, 2, 4), requires=("zero_grad",), reports=("mindspore-ai/hyper-parallel#396",))
def what_waits_is_cleared(ctx: Context) -> None:
    for reduce_dtype in (None, "float64"):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mp_policy=ctx.policy(reduce_dtype=reduce_dtype))
        ctx.train(model, ctx.inputs(RECIPE, step=0))
        model.set_requires_gradient_sync(False)
        ctx.train(model, ctx.inputs(RECIPE, step=1))
        ctx.api.zero_grad(model)
        check_equal(list(ctx.present_gradients(model)), [], what="gradients after zero_grad")
        model.set_requires_gradient_sync(True)
        ctx.train(model, ctx.inputs(RECIPE, step=2))
        truth = ctx.true_gradients(RECIPE, steps=(2,))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of the next batch with {reduce_dtype}")


@case("OPT-07", procs=(2, 4), requires=("zero_grad",), reports=("mindspore-ai/hyper-parallel#396",))
def partial_sums_are_cleared(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=ctx.mesh_2d(2))
    model.set_requires_all_reduce(False)
    ctx.train(model, ctx.inputs(RECIPE, step=0))
    ctx.api.zero_grad(model)
    model.set_requires_all_reduce(True)
    ctx.train(model, ctx.inputs(RECIPE, step=1))
    check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE, steps=(1,)), what="gradient of the next batch")


@case("OPT-08", procs=(1, 2), reports=("huggingface/accelerate#3859",))
def an_optimizer_from_before_wrapping(ctx: Context) -> None:
    model = ctx.model(RECIPE)
    optimizer = ctx.framework.optimizer(model, kind="sgd", lr=0.125)
    ctx.shard(model, units=UNITS)
    before = ctx.values(model)
    ctx.train(model, ctx.inputs(RECIPE))
    truth = {name: before[name] - np.float32(0.125) * gradient for name, gradient in ctx.gradients(model).items()}
    try:
        ctx.optimizer_step(optimizer)
    except (ValueError, RuntimeError) as error:
        check("after" in str(error), f"expected an error that says to make it after wrapping, but got {error!r}")
    else:
        check_arrays(ctx.values(model), truth, what="value after a step of an optimizer from before wrapping")


@case("OPT-09", procs=(1, 2, 4), reports=("huggingface/accelerate#4289", "huggingface/accelerate#3971"))
def loading_takes_no_step(ctx: Context) -> None:
    first, second = (ctx.shard(ctx.model(RECIPE), units=UNITS) for _ in range(2))
    optimizers = [ctx.framework.optimizer(model, kind="adamw", lr=0.125) for model in (first, second)]
    for step in range(3):
        ctx.train(first, ctx.inputs(RECIPE, step=step))
        ctx.optimizer_step(optimizers[0])
        optimizers[0].zero_grad()
    before = ctx.values(second)
    ctx.framework.load_optimizer_state(optimizers[1], states_in_order(ctx, first, optimizers[0]))
    check_arrays(ctx.values(second), before, what="value after loading states")
    check_equal(list(ctx.present_gradients(second)), [], what="gradients after loading states")
    check_arrays(ctx.states(second, optimizers[1]), ctx.states(first, optimizers[0]), what="loaded state:")
    counts = {float(value) for name, value in ctx.states(second, optimizers[1]).items() if name.startswith("step ")}
    check_equal(counts, {3.0}, what="numbers of steps")


def states_in_order(ctx: Context, model: Any, optimizer: Any) -> list[dict[str, Array]]:
    """Global states, a dict for each parameter."""
    return [
        {key: ctx.framework.full(value) for key, value in ctx.framework.optimizer_state(optimizer, parameter).items()}
        for parameter in ctx.framework.parameters(model).values()
    ]
