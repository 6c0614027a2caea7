"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcompat_conformance.adamw import bfloat16
from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_close, check_equal, check_raises
from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Branches, Chain, Tied
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.two_meshes import shard_on_two_meshes

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain(sizes=(4, 7, 5, 1), own=True)  # uneven, with empty parts
CLIP = ("clip_grad_norm_",)
TOLERANCE = 1e-6


def norm_of(gradients: Iterable[Array], *, order: float = 2.0) -> float:
    """In float64."""
    elements = np.concatenate([np.abs(gradient.astype(np.float64)).reshape(-1) for gradient in gradients])
    return float(elements.max()) if math.isinf(order) else float((elements**order).sum() ** (1 / order))


def check_norm(found: float, expected: float, *, what: str, tolerance: float = TOLERANCE) -> None:
    """Up to the rounding of a float32 sum."""
    is_near = abs(found - expected) <= tolerance * abs(expected)
    check(is_near, f"norm {what}: expected {expected!r}, but got {found!r}, {found / expected:.6g} times that")


def check_clipping(ctx: Context, model: Any, gradients: dict[str, Array], *, what: str, **options: Any) -> None:
    """The norm of these gradients, and what clipping to half of it leaves."""
    expected = norm_of(gradients.values(), order=options.get("norm_type", 2.0))
    check_norm(ctx.clip(model, expected / 2, **options), expected, what=what)
    halved = {name: gradient / 2 for name, gradient in gradients.items()}
    check_close(ctx.present_gradients(model), halved, what=f"clipped gradient {what}", tolerance=TOLERANCE)


def meshes(ctx: Context) -> dict[str, Any]:
    """All with two axes, by what to call them."""
    sizes = [size for size in (1, 2, 4) if ctx.world_size % size == 0]
    return {f"with {size} replicas": ctx.mesh_2d(size) for size in sizes}


def check_orders(ctx: Context, recipe: Chain, orders: tuple[float, ...]) -> None:
    """On every mesh."""
    truth = ctx.true_gradients(recipe)
    for name, mesh in meshes(ctx).items():
        for order in orders:
            model = ctx.shard(ctx.model(recipe), units=UNITS, mesh=mesh)
            ctx.train(model, ctx.inputs(recipe))
            check_clipping(ctx, model, truth, what=f"of order {order} {name}", norm_type=order)


@case(
    "NRM-01",
    procs=(1, 2, 4),
    requires=CLIP,
    reports=("mindspore-ai/hyper-parallel#279", "ByteDance-Seed/VeOmni#184", "verl-project/verl#2282"),
)
def sums_of_powers_on_every_mesh(ctx: Context) -> None:
    check_orders(ctx, RECIPE, (2.0, 1.0, 3.0))


@case(
    "NRM-01", procs=(1, 2, 4), requires=CLIP, reports=("mindspore-ai/hyper-parallel#279", "ByteDance-Seed/VeOmni#184")
)
def the_largest_element_on_every_mesh(ctx: Context) -> None:
    check_orders(ctx, Chain(own=True), (math.inf,))


@case("NRM-01", procs=(2, 4), requires=CLIP, reports=("ByteDance-Seed/VeOmni#974",))
def the_largest_element_with_empty_parts(ctx: Context) -> None:
    check_orders(ctx, RECIPE, (math.inf,))


@case("NRM-02", procs=(1, 2, 4), requires=CLIP, reports=("verl-project/verl#2282",))
def a_limit_above_the_norm(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE)
    for name, mesh in meshes(ctx).items():
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=mesh)
        ctx.train(model, ctx.inputs(RECIPE))
        check_norm(ctx.clip(model, 2 * norm_of(truth.values())), norm_of(truth.values()), what=name)
        check_arrays(ctx.gradients(model), truth, what=f"gradient below the limit {name}")


@case("NRM-02", procs=(1, 2, 4), requires=CLIP)
def the_same_clipping_on_every_rank_and_twice(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    ctx.train(model, ctx.inputs(RECIPE))
    norm = norm_of(ctx.true_gradients(RECIPE).values())
    check_norm(ctx.clip(model, norm / 4), norm, what="before clipping")
    check_norm(ctx.clip(model, norm), norm / 4, what="after clipping")


@case(
    "NRM-03",
    procs=(1, 2, 4),
    requires=(*CLIP, "replicate"),
    reports=("pytorch/torchtitan#2318", "ByteDance-Seed/VeOmni#471"),
)
def the_same_norm_however_wrapped(ctx: Context) -> None:
    truth = ctx.true_gradients(RECIPE)
    model = ctx.replicate(ctx.model(RECIPE), units=UNITS)
    ctx.train(model, ctx.inputs(RECIPE))
    check_clipping(ctx, model, truth, what="under replicate")
    for name, mesh in meshes(ctx).items():
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=mesh)
        ctx.train(model, ctx.inputs(RECIPE))
        check_clipping(ctx, model, truth, what=name)


@case("NRM-04", procs=(1, 2, 4), requires=CLIP, reports=("pytorch/pytorch#183207", "mindspore-ai/hyper-parallel#279"))
def ignored_parameters(ctx: Context) -> None:
    for name, mesh in meshes(ctx).items():
        model = ctx.model(RECIPE)
        parameters = ctx.framework.parameters(model)
        ctx.shard(model, mesh=mesh, ignored_params={p for key, p in parameters.items() if key.endswith("bias")})
        # Ignored parameters are not reduced: the same batch on all ranks.
        ctx.train(model, ctx.inputs(RECIPE, rank=0))
        check_clipping(ctx, model, ctx.true_gradients(RECIPE, ranks=(0,)), what=name)


@case(
    "NRM-04",
    procs=(1, 2, 4),
    requires=(*CLIP, "fully_shard.replicate_params"),
    reports=("mindspore-ai/hyper-parallel#279", "mindspore-ai/hyper-parallel#735"),
)
def replicated_parameters(ctx: Context) -> None:
    for name, mesh in meshes(ctx).items():
        model = ctx.model(RECIPE)
        parameters = ctx.framework.parameters(model)
        ctx.shard(model, mesh=mesh, replicate_params={p for key, p in parameters.items() if key.endswith("bias")})
        ctx.train(model, ctx.inputs(RECIPE))
        check_clipping(ctx, model, ctx.true_gradients(RECIPE), what=name)


@case(
    "NRM-05",
    procs=(2, 4),
    requires=(*CLIP, "ShardPlacementResult", "FSDPMeshInfo"),
    reports=("pytorch/pytorch#180501",),
)
def parameters_on_two_meshes(ctx: Context) -> None:
    model = shard_on_two_meshes(ctx, ctx.model(RECIPE))
    # Each mesh averages over its own ranks: the same batch on all.
    ctx.train(model, ctx.inputs(RECIPE, rank=0))
    check_clipping(ctx, model, ctx.true_gradients(RECIPE, ranks=(0,)), what="on two meshes")


@case("NRM-06", procs=(1, 2, 4), requires=CLIP)
def frozen_and_unused_parameters(ctx: Context) -> None:
    model = ctx.model(Branches())
    ctx.framework.set_requires_grad(ctx.framework.child(model, "layers.0"), False)
    ctx.shard(model, units=UNITS[1:])
    ctx.train(model, ctx.inputs(Branches()), use=(2,))
    truth = ctx.true_gradients(Branches(), use=(2,))
    trained = {name: gradient for name, gradient in truth.items() if name.startswith("layers.2.")}
    check_clipping(ctx, model, trained, what="of one layer out of three")


@case("NRM-07", procs=(1, 2, 4), requires=CLIP)
def an_infinite_norm(ctx: Context) -> None:
    for bad in (math.inf, math.nan):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS)
        ctx.train(model, ctx.inputs(RECIPE))
        gradients = ctx.true_gradients(RECIPE)
        gradients["layers.1.weight"][-1, 0] = bad  # on the last rank alone, if there are two
        parameters = ctx.framework.parameters(model)
        ctx.framework.set_gradient(parameters["layers.1.weight"], gradients["layers.1.weight"])
        with check_raises(RuntimeError, containing="non-finite"):
            ctx.clip(model, 1.0, error_if_nonfinite=True)
        check_arrays(ctx.gradients(model), gradients, what=f"gradient after the refusal of {bad}")
        found = ctx.clip(model, 1.0)
        check(not math.isfinite(found), f"expected a norm that is not finite, but got {found}")


@case(
    "NRM-08",
    procs=(1, 2, 4),
    requires=(*CLIP, "bfloat16"),
    reports=("mindspore-ai/hyper-parallel#446", "ByteDance-Seed/VeOmni#862"),
)
def the_norm_of_bfloat16_gradients(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(sizes=(100, 1000)), dtype="bfloat16"))
    random = np.random.default_rng(ctx.seed)
    gradients: dict[str, Array] = {}
    for name, parameter in ctx.framework.parameters(model).items():
        gradients[name] = bfloat16(random.normal(0, 1, ctx.framework.shape(parameter)).astype(np.float32))
        ctx.framework.set_gradient(parameter, gradients[name])
    # Rounded to bfloat16 it would be off by up to 2**-9.
    expected = norm_of(gradients.values())
    check_norm(ctx.clip(model, 1e9), expected, what="of 101000 numbers in bfloat16", tolerance=1e-5)


@case("NRM-09", procs=(1, 2, 4), requires=CLIP, reports=("mindspore-ai/hyper-parallel#279",))
def a_shared_parameter(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Tied()))
    ctx.train(model, ctx.inputs(Tied()))
    names = list(ctx.framework.parameters(model))
    check_equal(len(names), 3, what=f"number of parameters, {names}")
    check_clipping(ctx, model, ctx.true_gradients(Tied()), what="with a shared parameter")
