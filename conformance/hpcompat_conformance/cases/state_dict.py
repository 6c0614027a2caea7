"""Values and optimizer states that leave a sharded model and come back, also to other meshes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.cases.optimizer import states_in_order
from hpcompat_conformance.checks import check, check_arrays, check_close, check_equal, check_raises
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Buffered, Chain
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
UNEVEN = Chain(sizes=(4, 6, 7, 3), own=True)


@case("SDT-04", procs=(1, 2, 4))
def a_state_dict_follows_training(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    state = ctx.framework.state_dict(model)
    before = {name: ctx.framework.full(value) for name, value in state.items()}
    optimizer = ctx.framework.optimizer(model, kind="sgd", lr=0.125)
    for step in range(2):
        ctx.train(model, ctx.inputs(UNEVEN, step=step))
        ctx.optimizer_step(optimizer)
        optimizer.zero_grad()
    values = ctx.values(model)
    check_arrays({name: ctx.framework.full(value) for name, value in state.items()}, values, what="value in the dict")
    check(any((values[name] != before[name]).any() for name in values), "expected training to change values")


def step_of(ctx: Context, model: Any, optimizer: Any, *, step: int) -> None:
    """The same batch on all ranks, so that the mesh does not matter."""
    ctx.train(model, ctx.inputs(UNEVEN, step=step, rank=0))
    ctx.optimizer_step(optimizer)
    optimizer.zero_grad()


def everything(ctx: Context, model: Any, optimizer: Any) -> dict[str, Array]:
    """Values and states."""
    return {f"value of {name}": value for name, value in ctx.values(model).items()} | ctx.states(model, optimizer)


def adamw(ctx: Context, model: Any) -> Any:
    """Of a rate that leaves the numbers small."""
    return ctx.framework.optimizer(model, kind="adamw", lr=2.0**-6)


@case("SDT-05", procs=(1, 2, 4), reports=("pytorch/pytorch#136228", "pytorch/torchtitan#811"))
def from_mesh_to_mesh(ctx: Context) -> None:
    sizes = [size for size in (1, 2, 4) if ctx.world_size % size == 0]
    for source in sizes:
        first = ctx.shard(ctx.model(UNEVEN), units=UNITS, mesh=ctx.mesh_2d(source))
        optimizer = adamw(ctx, first)
        for step in range(2):
            step_of(ctx, first, optimizer, step=step)
        values, states = ctx.values(first), states_in_order(ctx, first, optimizer)
        step_of(ctx, first, optimizer, step=2)
        expected = everything(ctx, first, optimizer)
        for target in sizes:
            second = ctx.shard(ctx.framework.model(UNEVEN, seed=ctx.seed + 1), mesh=ctx.mesh_2d(target))
            ctx.framework.load_state_dict(second, values)
            other = adamw(ctx, second)
            ctx.framework.load_optimizer_state(other, states)
            step_of(ctx, second, other, step=2)
            what = f"from {ctx.world_size // source} shards to {ctx.world_size // target}, after one more step:"
            check_close(everything(ctx, second, other), expected, what=what, tolerance=1e-6)


@case(
    "SDT-06",
    procs=(1, 2, 4),
    requires=("bfloat16",),
    reports=("huggingface/accelerate#3971", "databricks/flashoptim#3"),
)
def a_round_trip(ctx: Context) -> None:
    for dtype in ("float32", "bfloat16"):
        models = [ctx.shard(ctx.model(Chain(sizes=(8, 8, 8)), dtype=dtype)) for _ in range(2)]
        optimizers = [adamw(ctx, model) for model in models]
        random = np.random.default_rng(ctx.seed)
        for _ in range(3):
            for parameter in ctx.framework.parameters(models[0]).values():
                gradient = random.normal(0, 1, ctx.framework.shape(parameter)).astype(np.float32)
                ctx.framework.set_gradient(parameter, gradient)
            ctx.optimizer_step(optimizers[0])
        expected = everything(ctx, models[0], optimizers[0])
        check_equal(len(expected), 4 * 4, what="number of values and states")
        ctx.framework.load_state_dict(models[1], ctx.values(models[0]))
        ctx.framework.load_optimizer_state(optimizers[1], states_in_order(ctx, models[0], optimizers[0]))
        check_arrays(everything(ctx, models[1], optimizers[1]), expected, what=f"{dtype} after a round trip:")


@case("SDT-07", procs=(1, 2, 4))
def values_of_another_shape(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    before = ctx.values(model)
    wrong = before | {"layers.1.weight": np.zeros((5, 6), dtype=np.float32)}
    try:
        ctx.framework.load_state_dict(model, wrong)
    except (ValueError, RuntimeError) as error:
        check("layers.1.weight" in str(error) or "shape" in str(error), f"expected the name, but got {error!r}")
    else:
        check(False, "expected a value of another shape to be refused, but it was loaded")
    check_arrays(
        {"layers.1.weight": ctx.values(model)["layers.1.weight"]},
        {"layers.1.weight": before["layers.1.weight"]},
        what="value after the refusal",
    )


def parts(ctx: Context, model: Any) -> dict[str, Any]:
    """What this rank holds, as plain tensors."""
    state = ctx.framework.state_dict(model)
    return {name: ctx.framework.tensor(ctx.framework.local(value)) for name, value in state.items()}


@case("SDT-12", procs=(2, 4))
def parts_of_one_rank(ctx: Context) -> None:
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    before = ctx.values(model)
    with check_raises((ValueError, RuntimeError), containing="layers.1.weight"):
        model.load_state_dict(parts(ctx, ctx.shard(ctx.framework.model(UNEVEN, seed=ctx.seed + 1), units=UNITS)))
    check_arrays(ctx.values(model), before, what="value after the refusal")


@case("SDT-13", procs=(1, 2, 4), requires=("load_local_state_dict",))
def parts_of_each_rank(ctx: Context) -> None:
    other = ctx.shard(ctx.framework.model(UNEVEN, seed=ctx.seed + 1), units=UNITS)
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    ctx.api.load_local_state_dict(model, parts(ctx, other))
    check_arrays(ctx.values(model), ctx.values(other), what="value after loading this rank's part")
    if ctx.world_size > 1:
        whole = {name: ctx.framework.tensor(value) for name, value in ctx.values(model).items()}
        with check_raises(ValueError, containing="layers.1.weight"):
            ctx.api.load_local_state_dict(model, whole)
    ctx.train(model, ctx.inputs(UNEVEN))


@case("SDT-08", procs=(1, 2, 4), requires=("bfloat16",), reports=("pytorch/pytorch#146114",))
def buffers(ctx: Context) -> None:
    recipe = Buffered()
    expected = {"offset": np.array(recipe.offset, dtype=np.float32), "count": np.array([3], dtype=np.int32)}
    policy = ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")
    for mp_policy in (ctx.policy(), policy):
        model = ctx.shard(ctx.model(recipe), mp_policy=mp_policy)
        for _ in range(2):
            output = model(ctx.inputs(recipe))
            found = {name: ctx.framework.array(value) for name, value in ctx.framework.buffers(model).items()}
            check_arrays(found, expected, what=f"buffer with {mp_policy}")
            ctx.framework.backward(ctx.framework.loss(output))
        state = ctx.framework.state_dict(model)
        kept = {name: ctx.framework.array(state[name]) for name in expected}
        check_arrays(kept, expected, what=f"buffer in the state dict with {mp_policy}")


@case("SDT-09", procs=(1, 2, 4), requires=("full_tensor",), reports=("huggingface/accelerate#3487",))
def whole_values_as_plain_tensors(ctx: Context) -> None:
    truth, values = ctx.true_gradients(UNEVEN), ctx.values(ctx.model(UNEVEN))
    model = ctx.shard(ctx.model(UNEVEN), units=UNITS)
    ctx.train(model, ctx.inputs(UNEVEN))
    for name, parameter in ctx.framework.parameters(model).items():
        whole = ctx.api.full_tensor(parameter)
        check_arrays({name: ctx.framework.array(whole)}, {name: values[name]}, what="whole value")
        gradient = ctx.api.full_tensor(parameter, parameter.grad)
        check_arrays({name: ctx.framework.array(gradient)}, {name: truth[name]}, what="whole gradient")


@case("SDT-10", procs=(1, 2, 4), requires=("meta device",), reports=("mindspore-ai/hyper-parallel#306",))
def from_the_meta_device(ctx: Context) -> None:
    values = ctx.values(ctx.model(UNEVEN))
    model = ctx.shard(ctx.framework.meta_model(UNEVEN), units=UNITS)
    with check_raises(RuntimeError, containing="materialized from meta device"):
        model(ctx.inputs(UNEVEN))
    model = ctx.shard(ctx.framework.meta_model(UNEVEN), units=UNITS)
    ctx.framework.materialize(model)
    ctx.framework.load_state_dict(model, values)
    check_equal(set(ctx.sharded(model).values()), {True}, what="sharded after loading")
    check_arrays(ctx.values(model), values, what="value after loading")
    for step in range(2):
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(UNEVEN, step=step))
        truth = ctx.true_gradients(UNEVEN, steps=(step,))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of step {step}")


@case("SDT-11", procs=(1, 2), reports=("pytorch/torchtitan#4753",))
def taken_inside_a_forward(ctx: Context) -> None:
    values = ctx.values(ctx.model(UNEVEN))
    for policy in (True, False):
        model = ctx.shard(ctx.model(UNEVEN), units=UNITS, reshard_after_forward=policy)
        taken: list[dict[str, Any]] = []

        def take(*_: Any, model: Any = model, taken: list[dict[str, Any]] = taken) -> None:
            taken.append({name: ctx.framework.local(value) for name, value in ctx.framework.state_dict(model).items()})

        ctx.framework.child(model, UNITS[0]).register_forward_pre_hook(take)
        ctx.train(model, ctx.inputs(UNEVEN))
        check_arrays(ctx.gradients(model), ctx.true_gradients(UNEVEN), what="gradient")
        check_arrays(ctx.values(model), values, what="value")
        after = {name: ctx.framework.local(value) for name, value in ctx.framework.state_dict(model).items()}
        check_arrays(taken[0], after, what="sharded value inside the forward")
