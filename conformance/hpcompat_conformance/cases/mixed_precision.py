"""Which dtype where."""

from __future__ import annotations

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close, check_equal
from hpcompat_conformance.recipes import Chain, Probe
from hpcompat_conformance.run_context import Context

BF16 = ("bfloat16",)
MAIN_GRAD = ("MixedPrecisionPolicy.apply_grad_on_fp32_main_grad", "full_tensor", "zero_grad")
CHAIN = Chain()
CHAIN_UNITS = ("layers.0", "layers.1", "layers.2")


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


@case("MPR-06", procs=(1, 2), requires=BF16, reports=("pytorch/torchtitan#2881",))
def inputs_are_left_alone(ctx: Context) -> None:
    policy = ctx.policy(param_dtype="bfloat16", cast_forward_inputs=False)
    model = ctx.shard(ctx.model(Probe()), mp_policy=policy)
    model(ctx.inputs(Probe()), side=ctx.framework.tensor(np.array([0.5], dtype=np.float32)))
    check_equal(model.seen, {"input": "float32", "side": "float32", "weight": "bfloat16"}, what="dtypes in forward")


@case("MPR-07", procs=(1, 2, 4), requires=BF16, reports=("pytorch/pytorch#195946",))
def each_unit_its_own_policy(ctx: Context) -> None:
    narrow = ctx.policy(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")
    model = ctx.model(CHAIN)
    ctx.shard(model, units=CHAIN_UNITS, by_unit={"layers.1": {"mp_policy": narrow}})
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(CHAIN))
    if ctx.world_size > 1:
        dtypes = {event.num_elements: event.dtype for event in log if event.kind == "all_gather"}
        check_equal(dtypes, {40: "float32", 108: "bfloat16", 208: "float32"}, what="dtypes of the gathers")
    check_close(ctx.gradients(model), ctx.true_gradients(CHAIN), what="gradient", tolerance=2.0**-6)


@case("MPR-08", procs=(1, 2, 4), requires=BF16, reports=("hiyouga/LlamaFactory#10157",))
def a_frozen_base_in_bfloat16(ctx: Context) -> None:
    models = [ctx.model(CHAIN) for _ in range(2)]
    for path in ("layers.0", "layers.2"):
        ctx.framework.set_requires_grad(ctx.framework.child(models[1], path), False)
        ctx.framework.cast(ctx.framework.child(models[1], path), "bfloat16")
    model = ctx.shard(models[1], mp_policy=ctx.policy(param_dtype="bfloat16", reduce_dtype="float32"))
    shapes = [{n: ctx.framework.shape(p) for n, p in ctx.framework.parameters(m).items()} for m in models]
    check_equal(shapes[1], shapes[0], what="global shapes")
    for _ in range(2):
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(CHAIN))
        truth = {n: grad for n, grad in ctx.true_gradients(CHAIN).items() if n.startswith("layers.1.")}
        check_close(ctx.present_gradients(model), truth, what="gradient", tolerance=2.0**-6)
        found = {n: ctx.framework.dtype_of(p) for n, p in ctx.framework.parameters(model).items()}
        expected = {n: "float32" if n.startswith("layers.1.") else "bfloat16" for n in found}
        check_equal(found, expected, what="dtypes of the sharded parameters")


@case("MPR-09", procs=(1, 2, 4), requires=BF16, reports=("pytorch/pytorch#156784",))
def two_trained_dtypes_in_a_unit(ctx: Context) -> None:
    model = ctx.model(CHAIN)
    ctx.framework.cast(ctx.framework.child(model, "layers.1"), "bfloat16")
    try:
        ctx.shard(model, mp_policy=ctx.policy(param_dtype="bfloat16", reduce_dtype="float32"))
        ctx.train(model, ctx.inputs(CHAIN))
    except Exception as error:
        check("layers." in str(error), f"expected an error that names parameters, but got {error!r}")
    else:
        check_close(ctx.gradients(model), ctx.true_gradients(CHAIN), what="gradient", tolerance=2.0**-6)


@case("MPR-10", procs=(1, 2, 4), requires=(*BF16, *MAIN_GRAD), reports=("mindspore-ai/hyper-parallel#396",))
def main_gradients(ctx: Context) -> None:
    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    options = {key: ctx.framework.dtype(dtype) for key, dtype in dtypes.items()}
    policy = ctx.api.MixedPrecisionPolicy(**options, apply_grad_on_fp32_main_grad=True)
    truth = ctx.true_gradients(Probe())
    models = [ctx.model(Probe(), dtype="bfloat16") for _ in range(2)]
    model = ctx.shard(models[1], mp_policy=policy)
    inputs = [ctx.framework.tensor(ctx.framework.array(ctx.inputs(Probe())), dtype="bfloat16") for _ in range(2)]
    for microbatch, batch in enumerate(inputs):
        model.set_requires_gradient_sync(microbatch == 1)
        ctx.train(model, batch, scale=0.5)
    optimizers = [ctx.framework.optimizer(m, kind="adamw", lr=0.125, multi_tensor=True) for m in models]
    plain = ctx.framework.parameters(models[0])
    for name, parameter in ctx.framework.parameters(model).items():
        check_equal(parameter.grad, None, what=f"gradient of {name} beside main_grad")
        check_equal(ctx.framework.dtype_of(parameter.main_grad), "float32", what=f"dtype of main_grad of {name}")
        found = ctx.framework.array(ctx.api.full_tensor(parameter, parameter.main_grad))
        check_arrays({name: found}, {name: truth[name]}, what="main_grad")
        ctx.framework.set_gradient(plain[name], truth[name])
    for optimizer in optimizers:
        ctx.optimizer_step(optimizer)
    check_arrays(ctx.values(model), ctx.values(models[0]), what="value after a step")
    ctx.api.zero_grad(model)
    left = [name for name, parameter in ctx.framework.parameters(model).items() if parameter.main_grad is not None]
    check_equal(left, [], what="parameters with a main_grad after zero_grad")
