"""Which dtype where."""

from __future__ import annotations

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal
from hpcompat_conformance.recipes import Probe
from hpcompat_conformance.run_context import Context

BF16 = ("bfloat16",)


@case("MPR-01", procs=(1, 2, 4), requires=BF16)
def parameters_in_forward_and_in_the_gather(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Probe()), mp_policy=ctx.policy(param_dtype="bfloat16"))
    with ctx.record() as log:
        model(ctx.inputs(Probe()))
    check_equal(model.seen["weight"], "bfloat16", what="dtype of the weight in forward")
    expected = [("all_gather", "bfloat16")] if ctx.world_size > 1 else []
    check_equal([(event.kind, event.dtype) for event in log], expected, what="collectives of forward")


@case("MPR-02", procs=(2, 4), requires=BF16)
def the_reduction(ctx: Context) -> None:
    expected = {("bfloat16", "float32"): "float32", ("bfloat16", None): "bfloat16", (None, "bfloat16"): "bfloat16"}
    for (param_dtype, reduce_dtype), dtype in expected.items():
        policy = ctx.policy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        model = ctx.shard(ctx.model(Probe()), mp_policy=policy)
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(Probe()))
        found = [event.dtype for event in log if event.kind == "reduce_scatter"]
        check_equal(found, [dtype], what=f"dtype of the reduction with {policy}")


@case("MPR-02", procs=(4,), requires=BF16)
def the_all_reduce_of_hsdp(ctx: Context) -> None:
    policy = ctx.policy(param_dtype="bfloat16", reduce_dtype="float32")
    model = ctx.shard(ctx.model(Probe()), mesh=ctx.mesh_2d(2), mp_policy=policy)
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(Probe()))
    expected = [("all_gather", "bfloat16"), ("reduce_scatter", "float32"), ("all_reduce", "float32")]
    check_equal([(event.kind, event.dtype) for event in log], expected, what="collectives")


@case("MPR-03", procs=(1, 2, 4), requires=BF16)
def sharded_parameters_and_gradients(ctx: Context) -> None:
    for reduce_dtype in ("float32", None):
        policy = ctx.policy(param_dtype="bfloat16", reduce_dtype=reduce_dtype)
        model = ctx.shard(ctx.model(Probe()), mp_policy=policy)
        ctx.train(model, ctx.inputs(Probe()))
        for name, parameter in ctx.framework.parameters(model).items():
            gradient = ctx.framework.gradient(parameter)
            found = [ctx.framework.dtype_of(tensor) for tensor in (parameter, gradient)]
            check_equal(found, ["float32", "float32"], what=f"dtypes of {name} and its gradient with {policy}")
        if reduce_dtype == "float32":  # then every number on the way is exact
            check_arrays(ctx.gradients(model), ctx.true_gradients(Probe()), what="gradient")


@case("MPR-04", procs=(1, 2), requires=BF16)
def outputs(ctx: Context) -> None:
    expected = {None: "bfloat16", "float32": "float32"}
    for output_dtype, dtype in expected.items():
        policy = ctx.policy(param_dtype="bfloat16", output_dtype=output_dtype)
        output = ctx.shard(ctx.model(Probe()), mp_policy=policy)(ctx.inputs(Probe()))
        check_equal(ctx.framework.dtype_of(output), dtype, what=f"dtype of the output with {policy}")


@case("MPR-05", procs=(1, 2), requires=BF16)
def inputs_are_cast(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Probe()), mp_policy=ctx.policy(param_dtype="bfloat16"))
    for side, dtype in ((np.float32(0.5), "bfloat16"), (np.int64(3), "int64")):
        model(ctx.inputs(Probe()), side=ctx.framework.tensor(np.array([side])))
        check_equal(model.seen["input"], "bfloat16", what="dtype of the input in forward")
        check_equal(model.seen["side"], dtype, what=f"dtype in forward of a keyword argument of {side.dtype}")


@case("MPR-06", procs=(1, 2), requires=BF16, reports=("A68",))
def inputs_are_left_alone(ctx: Context) -> None:
    policy = ctx.policy(param_dtype="bfloat16", cast_forward_inputs=False)
    model = ctx.shard(ctx.model(Probe()), mp_policy=policy)
    model(ctx.inputs(Probe()), side=ctx.framework.tensor(np.array([0.5], dtype=np.float32)))
    check_equal(model.seen, {"input": "float32", "side": "float32", "weight": "bfloat16"}, what="dtypes in forward")
