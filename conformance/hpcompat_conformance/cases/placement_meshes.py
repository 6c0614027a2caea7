"""Parameters of one unit on meshes of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal, check_raises
from hpcompat_conformance.framework import Collective
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
RECIPE = Chain()
REQUIRES = ("ShardPlacementResult", "FSDPMeshInfo")
WEIGHTS, BIASES = {32: "weight 0", 96: "weight 1", 192: "weight 2"}, {8: "bias 0", 12: "bias 1", 16: "bias 2"}


class Meshes:
    """Weights over the ``outer`` axis of a mesh of two, biases over the ``inner`` one."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        mesh = ctx.framework.mesh((ctx.world_size // 2, 2), axis_names=("outer", "inner"))
        self.outer, self.inner = (ctx.api.FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("outer", "inner"))

    def place(self, parameter: Any) -> Any:
        """A shard_placement_fn. Without a placement a parameter is split along dim 0."""
        if len(self._ctx.framework.shape(parameter)) == 1:
            return self._ctx.api.ShardPlacementResult(None, self.inner)
        return self._ctx.api.ShardPlacementResult(self._ctx.framework.shard(1), self.outer)

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ranks that a parameter is sharded over."""
        if name.endswith("bias"):
            first = self._ctx.rank - self._ctx.rank % 2
            return first, first + 1
        return tuple(range(self._ctx.rank % 2, self._ctx.world_size, 2))


def wrapped(ctx: Context, meshes: Meshes, **options: Any) -> Any:
    """A chain whose units have two meshes each."""
    return ctx.shard(ctx.model(RECIPE), units=UNITS, shard_placement_fn=meshes.place, **options)


@case("PLC-05", procs=(2, 4), requires=REQUIRES)
def parts_and_gradients(ctx: Context) -> None:
    meshes = Meshes(ctx)
    model = wrapped(ctx, meshes)
    values = ctx.values(ctx.model(RECIPE))
    for name, parameter in ctx.framework.parameters(model).items():
        ranks = meshes.ranks(name)
        dim = values[name].ndim - 1
        size = values[name].shape[dim] // len(ranks)
        start = size * ranks.index(ctx.rank)
        expected = values[name][(slice(None),) * dim + (slice(start, start + size),)]
        check_arrays({name: ctx.framework.local(parameter)}, {name: expected}, what="this rank's part")
    for step in range(2):
        ctx.framework.zero_grad(model)
        ctx.train(model, ctx.inputs(RECIPE, step=step))
        truth = {name: ctx.true_gradients(RECIPE, steps=(step,), ranks=meshes.ranks(name))[name] for name in values}
        check_arrays(ctx.gradients(model), truth, what=f"gradient of step {step}")


def in_words(log: Iterable[Collective]) -> list[str]:
    """``"gather weight 0"``. Only what goes over several ranks."""
    verbs = {"all_gather": "gather", "reduce_scatter": "reduce"}
    return [f"{verbs[event.kind]} {(WEIGHTS | BIASES)[event.num_elements]}" for event in log if event.group_size > 1]


def check_collectives(ctx: Context, model: Any, expected: str) -> None:
    """One forward and backward; ``both 0`` stands for the weight and the bias of layer 0, ``both -0`` for the bias and
    the weight."""
    for _ in range(2):
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(RECIPE))
        words: list[str] = []
        for step in expected.replace("|", ",").split(","):
            verb, what, layer = step.split()
            kinds = ("bias", "weight") if layer.startswith("-") else ("weight", "bias")
            words += [f"{verb} {kind} {layer.lstrip('-')}" for kind in (kinds if what == "both" else (what,))]
        check_equal(in_words(log), words, what="collectives")


@case("PLC-06", procs=(4,), requires=REQUIRES)
def collectives_mesh_by_mesh(ctx: Context) -> None:
    model = wrapped(ctx, Meshes(ctx), reshard_after_forward=False)
    expected = "gather both 0, gather both 1, gather both 2 | reduce both -2, reduce both -1, reduce both -0"
    check_collectives(ctx, model, expected)


@case("PLC-07", procs=(4,), requires=REQUIRES)
def backward_prefetch_of_several_meshes(ctx: Context) -> None:
    model = wrapped(ctx, Meshes(ctx))
    expected = """gather both 0, gather both 1, gather both 2
                | gather both 2, gather both -1, reduce both -2, gather both -0, reduce both -1, reduce both -0"""
    check_collectives(ctx, model, expected)


@case("PLC-07", procs=(4,), requires=REQUIRES)
def prefetch_lists_with_several_meshes(ctx: Context) -> None:
    model = wrapped(ctx, Meshes(ctx))
    first, second, third = (ctx.framework.child(model, path) for path in UNITS)
    first.set_modules_to_forward_prefetch([third, second])
    third.set_modules_to_backward_prefetch([first, second])
    expected = """gather both 0, gather both 2, gather both 1
                | gather both 2, gather both -0, gather both -1, reduce both -2, reduce both -1, reduce both -0"""
    check_collectives(ctx, model, expected)


@case("PLC-08", procs=(2, 4), requires=REQUIRES)
def results_that_make_no_sense(ctx: Context) -> None:
    for wrong in (0, "Shard(0)", (ctx.framework.shard(0), Meshes(ctx).outer)):
        with check_raises(ValueError, containing="shard_placement_fn"):
            ctx.shard(ctx.model(RECIPE), shard_placement_fn=lambda parameter, wrong=wrong: wrong)
    mesh = ctx.mesh()

    def place(parameter: Any) -> Any:
        return ctx.api.ShardPlacementResult(None, ctx.api.FSDPMeshInfo(mesh, shard_mesh_dim=0))

    with check_raises(ValueError, containing="must use the same FSDPMeshInfo object"):
        ctx.shard(ctx.model(RECIPE), shard_placement_fn=place)


@case(
    "PLC-09",
    procs=(2, 4),
    requires=("FSDPModule.set_force_sum_reduction_for_comms",),
    reports=("ByteDance-Seed/VeOmni#205",),
)
def a_unit_that_divides_by_all_ranks(ctx: Context) -> None:
    # As for experts: sharded over few ranks, averaged over all.
    mesh = ctx.framework.mesh((ctx.world_size // 2, 2), axis_names=("outer", "inner"))
    inner = tuple(range(ctx.rank - ctx.rank % 2, ctx.rank - ctx.rank % 2 + 2))
    for factor in (None, float(ctx.world_size), 8.0):
        model = ctx.model(RECIPE)
        expert = ctx.api.fully_shard(ctx.framework.child(model, "layers.1"), mesh=mesh["inner"])
        if factor is not None:
            expert.set_force_sum_reduction_for_comms(True)
            expert.set_gradient_divide_factor(factor)
        ctx.shard(model)
        ctx.train(model, ctx.inputs(RECIPE))
        truth = ctx.true_gradients(RECIPE)
        own = ctx.true_gradients(RECIPE, ranks=inner, divide_by=factor)
        truth |= {name: gradient for name, gradient in own.items() if name.startswith("layers.1.")}
        check_arrays(ctx.gradients(model), truth, what=f"gradient with factor {factor}")
