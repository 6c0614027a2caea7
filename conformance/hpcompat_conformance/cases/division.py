"""What a gradient is divided by, and multiplied with: one formula, however the settings are combined."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_close
from hpcompat_conformance.recipes import Chain, Probe
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(own=True)
FORCE = ("FSDPModule.set_force_sum_reduction_for_comms",)
SCALING = ("FSDPModule.set_gradient_scaling_factor", "FSDPModule.set_reduce_op_type")
# A division by 3 or 300 may be done in two roundings, as a multiplication, and before the sum.
TOLERANCE = 2.0**-21


def numbers_of_replicas(ctx: Context) -> list[int]:
    """Of every mesh of two axes."""
    return [number for number in (1, 2, 4) if ctx.world_size % number == 0]


def check_forced_sums(ctx: Context, factors: tuple[float | None, ...]) -> None:
    """Every mesh against the ranks' sum divided by the factor, or by their number."""
    for factor in factors:
        truth = ctx.true_gradients(RECIPE, divide_by=factor)
        for num_replicas in numbers_of_replicas(ctx):
            model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=ctx.mesh_2d(num_replicas))
            for module in (model, *(ctx.framework.child(model, path) for path in UNITS)):
                module.set_force_sum_reduction_for_comms(True)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            ctx.train(model, ctx.inputs(RECIPE))
            what = f"gradient with forced sums, factor {factor}, {num_replicas} replicas"
            check_close(ctx.gradients(model), truth, what=what, tolerance=TOLERANCE)


@case("RED-09", procs=(1, 2, 4), requires=FORCE)
def sums_instead_of_averages(ctx: Context) -> None:
    check_forced_sums(ctx, (None, 1.0))


@case(
    "RED-09",
    procs=(1, 2, 4),
    requires=FORCE,
    reports=("pytorch/pytorch#155903", "ByteDance-Seed/VeOmni#241", "pytorch/torchtitan#2332"),
)
def sums_and_a_factor(ctx: Context) -> None:
    check_forced_sums(ctx, (3.0, 300.0, float(ctx.world_size)))


@case("RED-10", procs=(1, 2, 4), requires=(*SCALING, "float16"), reports=("pytorch/pytorch#155903",))
def one_formula_on_every_mesh(ctx: Context) -> None:
    for reduce_dtype, tolerance in ((None, TOLERANCE), ("float16", 2.0**-9)):
        policy = ctx.policy(reduce_dtype=reduce_dtype)
        for num_replicas in numbers_of_replicas(ctx):
            model = ctx.shard(ctx.model(Probe()), mesh=ctx.mesh_2d(num_replicas), mp_policy=policy)
            for op_type in ("avg", "sum"):
                for scale in (None, 0.25):
                    what = f"{num_replicas} replicas and {policy}"
                    check_formula(ctx, model, op_type=op_type, scale=scale, what=what, tolerance=tolerance)
            # A factor cannot be taken back, so from here on there is one.
            for op_type, factor, scale in (("sum", 3.0, None), ("avg", 4.0, 0.5), ("avg", 1.0, 8.0)):
                what = f"{num_replicas} replicas and {policy}"
                model.set_gradient_divide_factor(factor)
                check_formula(ctx, model, op_type=op_type, factor=factor, scale=scale, what=what, tolerance=tolerance)


def check_formula(
    ctx: Context,
    model: Any,
    *,
    op_type: str,
    factor: float | None = None,
    scale: float | None,
    what: str,
    tolerance: float,
) -> None:
    """One step with an op type and a scaling factor, with forced sums and without."""
    model.set_reduce_op_type(op_type)
    model.set_gradient_scaling_factor(scale)
    divisor = factor or (1.0 if op_type == "sum" else float(ctx.world_size))
    truth = ctx.true_gradients(Probe(), divide_by=divisor / (scale or 1.0))
    for forces_sum in (False, True):
        model.set_force_sum_reduction_for_comms(forces_sum)
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(Probe()))
        settings = f"op type {op_type}, factor {factor}, scaling {scale}, forced sums {forces_sum}, {what}"
        check_close(ctx.gradients(model), truth, what=f"gradient with {settings}", tolerance=tolerance)


@case("RED-10", procs=(1, 2), requires=SCALING)
def a_scaling_factor_as_a_tensor_and_taken_back(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    model.set_gradient_scaling_factor(ctx.framework.tensor(np.array([0.25], dtype=np.float32)))
    truth = ctx.true_gradients(RECIPE)
    ctx.train(model, ctx.inputs(RECIPE))
    quarter = {name: gradient / 4 for name, gradient in truth.items()}
    check_arrays(ctx.gradients(model), quarter, what="gradient with a tensor as scaling factor")
    model.set_gradient_scaling_factor(None)
    ctx.framework.zero_grad(model)
    ctx.train(model, ctx.inputs(RECIPE))
    check_arrays(ctx.gradients(model), truth, what="gradient without scaling factor")


@case("RED-10", procs=(1, 2, 4), requires=("replicate", *SCALING))
def the_formula_under_replicate(ctx: Context) -> None:
    for op_type, factor, scale in (("avg", None, 2.0), ("sum", None, None), ("avg", 4.0, 0.5)):
        model = ctx.replicate(ctx.model(RECIPE), units=UNITS)
        model.set_reduce_op_type(op_type)
        model.set_gradient_scaling_factor(scale)
        if factor is not None:
            for module in (model, *(ctx.framework.child(model, path) for path in UNITS)):
                module.set_gradient_divide_factor(factor)
        ctx.train(model, ctx.inputs(RECIPE))
        divisor = factor or (1.0 if op_type == "sum" else float(ctx.world_size))
        truth = ctx.true_gradients(RECIPE, divide_by=divisor / (scale or 1.0))
        check_arrays(ctx.gradients(model), truth, what=f"gradient with {op_type}, {factor}, {scale}")
