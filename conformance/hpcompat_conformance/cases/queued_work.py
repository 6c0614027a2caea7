"""Reductions that are on their way: what they go by, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_close, check_equal
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
BUFFERS = ("FSDPModule.set_reduce_scatter_max_input_buffers",)
# Of the numbers here, which a narrow dtype rounds once or twice.
NARROW_TOLERANCE = 2.0**-6


@case(
    "RED-12", procs=(1, 2, 4), requires=(*BUFFERS, "bfloat16", "float16"), reports=("mindspore-ai/hyper-parallel#629",)
)
def units_with_reduce_dtypes_of_their_own(ctx: Context) -> None:
    dtypes = {"layers.0": "bfloat16", "layers.1": None, "layers.2": "float16"}
    policies = {path: {"mp_policy": ctx.policy(reduce_dtype=dtype)} for path, dtype in dtypes.items()}
    truth = ctx.true_gradients(RECIPE)
    for num_buffers in (1, 3):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, by_unit=policies)
        model.set_reduce_scatter_max_input_buffers(num_buffers)
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(RECIPE))
        found = [event.dtype for event in log if event.kind == "reduce_scatter"]
        expected = ["float16", "float32", "float32", "bfloat16"] if ctx.world_size > 1 else []
        check_equal(found, expected, what="dtypes of the reductions")
        gradients = ctx.gradients(model)
        exact = {name: gradient for name, gradient in truth.items() if name.startswith(("layers.1.", "scale"))}
        check_arrays({name: gradients[name] for name in exact}, exact, what=f"gradient with {num_buffers} buffers")
        check_close(gradients, truth, what=f"gradient with {num_buffers} buffers", tolerance=NARROW_TOLERANCE)


@case("RED-12", procs=(2, 4), requires=(*BUFFERS, "FSDPModule.set_force_sum_reduction_for_comms"))
def units_with_factors_of_their_own(ctx: Context) -> None:
    for num_buffers in (1, 3):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS)
        model.set_reduce_scatter_max_input_buffers(num_buffers)
        ctx.framework.child(model, "layers.1").set_gradient_divide_factor(float(ctx.world_size))
        for path, factor in (("", 0.5), ("layers.2", 2.0)):
            # Sums, as not every process group multiplies before it adds.
            ctx.framework.child(model, path).set_force_sum_reduction_for_comms(True)
            ctx.framework.child(model, path).set_gradient_divide_factor(factor)
        ctx.train(model, ctx.inputs(RECIPE))
        truth = ctx.true_gradients(RECIPE)
        truth["scale"] = ctx.true_gradients(RECIPE, divide_by=0.5)["scale"]
        halved = ctx.true_gradients(RECIPE, divide_by=2.0)
        truth |= {name: gradient for name, gradient in halved.items() if name.startswith("layers.2.")}
        check_arrays(ctx.gradients(model), truth, what=f"gradient with {num_buffers} buffers")


@case("RED-12", procs=(1, 2, 4), requires=BUFFERS)
def settings_that_change_after_a_reduction_has_begun(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE)
    meshes = [(replicas, buffers) for replicas in (1, 2, 4) if ctx.world_size % replicas == 0 for buffers in (1, 4)]
    for num_replicas, num_buffers in meshes:
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=ctx.mesh_2d(num_replicas))
        model.set_reduce_scatter_max_input_buffers(num_buffers)
        first, _, last = (ctx.framework.child(model, path) for path in UNITS)

        # The reduction of layers.2 has begun when backward reaches the output of layers.0.
        def change(gradient: Any, last: Any = last) -> None:
            last.set_gradient_divide_factor(float(8 * ctx.world_size))
            last.set_requires_all_reduce(False)

        ctx.framework.on_forward(first, after=lambda output, change=change: ctx.framework.on_gradient(output, change))
        ctx.train(model, ctx.inputs(RECIPE))
        what = f"gradient with {num_replicas} replicas and {num_buffers} buffers"
        check_arrays(ctx.gradients(model), truth, what=what)


@case("RED-13", procs=(1, 2, 4), requires=("bfloat16",), reports=("mindspore-ai/hyper-parallel#629",))
def the_gradients_of_the_parameters_stay(ctx: Context) -> None:
    for reduce_dtype in (None, "float32", "bfloat16"):
        # Holding the gradient itself may make the framework copy it before the reduction; holding its memory does not.
        for hold in (lambda gradient: gradient, lambda gradient: gradient.reshape(-1)):
            check_held_gradients(ctx, hold, reduce_dtype=reduce_dtype)


def check_held_gradients(ctx: Context, hold: Callable[[Any], Any], *, reduce_dtype: str | None) -> None:
    """What a hook keeps of each gradient must have the same values after backward."""
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mp_policy=ctx.policy(reduce_dtype=reduce_dtype))
    for path in UNITS:
        ctx.framework.child(model, path).unshard()
    held: dict[str, Any] = {}
    copies: dict[str, Array] = {}

    def keep(gradient: Any, name: str) -> None:
        held[name], copies[name] = hold(gradient), ctx.framework.array(hold(gradient))

    for name, parameter in ctx.framework.parameters(model).items():
        ctx.framework.on_gradient(parameter, lambda gradient, name=name: keep(gradient, name))
    ctx.train(model, ctx.inputs(Chain()))
    check_equal(len(held), 6, what="number of gradients held")
    check_close(ctx.gradients(model), ctx.true_gradients(Chain()), what="gradient", tolerance=NARROW_TOLERANCE)
    found = {name: ctx.framework.array(gradient) for name, gradient in held.items()}
    check_arrays(found, copies, what=f"held gradient with reduce dtype {reduce_dtype}")
