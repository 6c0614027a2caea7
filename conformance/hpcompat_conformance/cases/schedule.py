"""Which collectives are issued, in which order, over which ranks, of which size."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context, steps

UNITS = ("layers.0", "layers.1", "layers.2")


def check_schedule(
    ctx: Context, model: Any, expected: str, *, recipe: Chain, over: int | None = None, shard_size: int | None = None
) -> None:
    """One forward and backward must issue exactly these collectives."""
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(recipe))
    over = ctx.world_size if over is None else over
    check_equal(ctx.schedule(log, shard_size=shard_size), steps(expected, over=over), what="collectives")


@case("SCH-01", procs=(2, 4))
def one_gather_and_one_reduction_a_unit(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    expected = "gather 0, gather 1, gather 2 | reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-01", procs=(2, 4))
def one_unit_for_the_whole_model(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()))
    check_schedule(ctx, model, "gather root | reduce root", recipe=Chain())


@case("SCH-01", procs=(4,))
def hsdp_reduces_over_shard_then_over_replicate(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), mesh=ctx.mesh_2d(2))
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(Chain()))
    neighbours = (0, 1) if ctx.rank < 2 else (2, 3)
    twins = (0, 2) if ctx.rank % 2 == 0 else (1, 3)
    expected = [("all_gather", neighbours), ("reduce_scatter", neighbours), ("all_reduce", twins)]
    check_equal([(event.kind, event.ranks) for event in log], expected, what="collectives and their ranks")


@case("SCH-02", procs=(2, 4))
def backward_gathers_the_previous_unit_before_it_reduces(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    expected = """gather 0, gather 1, gather 2
                | gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce 0"""
    for _ in range(2):
        check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-02", procs=(4,))
def backward_of_hsdp_gathers_the_previous_unit_before_it_reduces(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mesh=ctx.mesh_2d(2))
    expected = """gather 0, gather 1, gather 2
                | gather 2, gather 1, reduce 2, all-reduce 2
                | gather 0, reduce 1, all-reduce 1
                | reduce 0, all-reduce 0"""
    check_schedule(ctx, model, expected, recipe=Chain(), over=2, shard_size=2)


@case("SCH-03", procs=(2, 4))
def sizes_of_uneven_rows(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 7, 5, 3, 1))
    units = tuple(f"layers.{index}" for index in range(4))
    model = ctx.shard(ctx.model(recipe), units=units, reshard_after_forward=False)
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(recipe))
    # Rows 7, 5, 3 and 1 of 4, 7, 5 and 3 columns and a bias.
    rows = {2: (8, 6, 4, 2), 4: (8, 8, 4, 4)}[ctx.world_size]
    sizes = [n * (columns + 1) for n, columns in zip(rows, (4, 7, 5, 3), strict=True)]
    check_equal([event.num_elements for event in log], sizes + sizes[::-1], what="sizes of the collectives")
    check_equal({event.dtype for event in log}, {"float32"}, what="dtypes of the collectives")


@case("SCH-04", procs=(1,), reports=("mindspore-ai/hyper-parallel#306",))
def one_process_communicates_nothing(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    check_schedule(ctx, model, "", recipe=Chain())


@case("SCH-04", procs=(2, 4), reports=("mindspore-ai/hyper-parallel#306",))
def a_shard_axis_of_one_only_all_reduces(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, mesh=ctx.mesh_2d(ctx.world_size))
    check_schedule(ctx, model, "all-reduce 2, all-reduce 1, all-reduce 0", recipe=Chain(), shard_size=1)


@case("SCH-05", procs=(2, 4))
def evaluation_gathers_and_does_not_reduce(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    with ctx.record() as log, ctx.framework.no_grad():
        for step in range(2):
            model(ctx.inputs(Chain(), step=step))
    check_equal(ctx.schedule(log), steps("gather 0, gather 1, gather 2", over=ctx.world_size) * 2, what="collectives")


@case("SCH-05", procs=(2, 4))
def evaluation_keeps_what_forward_does_not_free(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    with ctx.record() as log, ctx.framework.no_grad():
        for step in range(2):
            model(ctx.inputs(Chain(), step=step))
    check_equal(ctx.schedule(log), steps("gather 0, gather 1, gather 2", over=ctx.world_size), what="collectives")


@case("SCH-06", procs=(2, 4))
def forward_prefetch_follows_the_list(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=False)
    first, second, third = (ctx.framework.child(model, path) for path in UNITS)
    first.set_modules_to_forward_prefetch([third, second])
    expected = "gather 0, gather 2, gather 1 | reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-07", procs=(2, 4))
def backward_prefetch_list_replaces_the_guess(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    first, _, third = (ctx.framework.child(model, path) for path in UNITS)
    third.set_modules_to_backward_prefetch([first])
    expected = """gather 0, gather 1, gather 2
                | gather 2, gather 0, reduce 2, gather 1, reduce 1, reduce 0"""
    check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-08", procs=(2, 4))
def a_frozen_unit_is_gathered_but_not_reduced(ctx: Context) -> None:
    model = ctx.model(Chain())
    ctx.framework.set_requires_grad(ctx.framework.child(model, "layers.1"), False)
    ctx.shard(model, units=UNITS)
    expected = "gather 0, gather 1, gather 2 | gather 2, gather 1, reduce 2, gather 0, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-09", procs=(2, 4))
def a_unit_called_twice_is_gathered_twice_and_reduced_once(ctx: Context) -> None:
    recipe = Chain(sizes=(4, 8, 8, 16), order=(0, 1, 1, 2))
    model = ctx.shard(ctx.model(recipe), units=UNITS)
    expected = """gather 0, gather 1, gather 1, gather 2
                | gather 2, gather 1, reduce 2, gather 1, gather 0, reduce 1, reduce 0"""
    check_schedule(ctx, model, expected, recipe=recipe)


@case("SCH-10", procs=(2, 4), requires=("FSDPModule.set_unshard_in_backward",))
def a_unit_that_backward_does_not_need_is_not_gathered(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    # Its input needs no gradient, so its weight is not used in backward.
    ctx.framework.child(model, "layers.0").set_unshard_in_backward(False)
    expected = "gather 0, gather 1, gather 2 | gather 2, gather 1, reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("SCH-11", procs=(2, 4))
def what_was_prefetched_in_vain_is_dropped(ctx: Context) -> None:
    plain, model = ctx.model(Chain()), ctx.shard(ctx.model(Chain()), units=UNITS)
    first, _, third = (ctx.framework.child(model, path) for path in UNITS)
    first.set_modules_to_backward_prefetch([third])  # which is done by then
    optimizers = [ctx.framework.optimizer(m, kind="sgd", lr=2.0**-12) for m in (plain, model)]
    expected = """gather 0, gather 1, gather 2
                | gather 2, gather 1, reduce 2, gather 0, reduce 1, gather 2, reduce 0"""
    for step in range(2):
        for rank in range(ctx.world_size):
            ctx.train(plain, ctx.inputs(Chain(), step=step, rank=rank), scale=1 / ctx.world_size)
        with ctx.record() as log:
            ctx.train(model, ctx.inputs(Chain(), step=step))
        check_equal(ctx.schedule(log), steps(expected, over=ctx.world_size), what="collectives")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_arrays(ctx.values(model), ctx.values(plain), what="value", ulps=4)


@case("RSF-01", procs=(2, 4))
def true_gathers_again(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(own=True)), reshard_after_forward=True)
    check_schedule(ctx, model, "gather root | gather root, reduce root", recipe=Chain(own=True))


@case("RSF-02", procs=(2, 4))
def false_gathers_once(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=False)
    expected = """gather root, gather 0, gather 1, gather 2
                | reduce 2, reduce 1, reduce root, reduce 0"""
    for _ in range(2):
        check_schedule(ctx, model, expected, recipe=Chain(own=True))


@case("RSF-03", procs=(4,))
def an_int_gathers_again_from_that_many_ranks(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=2)
    expected = """gather 0, gather 1, gather 2
                | gather 2 over 2, gather 1 over 2, reduce 2, gather 0 over 2, reduce 1, reduce 0"""
    with ctx.record() as log:
        ctx.train(model, ctx.inputs(Chain()))
    check_equal(ctx.schedule(log), steps(expected, over=4), what="collectives")
    small = {event.ranks for event in log if event.group_size == 2}
    check_equal(small, {(0, 1) if ctx.rank < 2 else (2, 3)}, what="ranks gathered from in backward")


@case("RSF-04", procs=(2, 4))
def an_int_of_one_is_false(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=1)
    expected = "gather 0, gather 1, gather 2 | reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("RSF-04", procs=(2, 4))
def an_int_of_all_ranks_is_true(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), reshard_after_forward=ctx.world_size)
    check_schedule(ctx, model, "gather root | gather root, reduce root", recipe=Chain())


@case("RSF-05", procs=(2, 4), reports=("pytorch/pytorch#131965",))
def the_root_stays_by_default(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS)
    expected = """gather root, gather 0, gather 1, gather 2
                | gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce root, reduce 0"""
    check_schedule(ctx, model, expected, recipe=Chain(own=True))


@case("RSF-06", procs=(2, 4), reports=("pytorch/pytorch#154655",))
def a_root_set_to_true_is_freed(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, root={"reshard_after_forward": True})
    expected = """gather root, gather 0, gather 1, gather 2
                | gather root, gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce root, reduce 0"""
    check_schedule(ctx, model, expected, recipe=Chain(own=True))


@case("RSF-07", procs=(2, 4))
def the_policy_can_change_between_steps(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    ctx.train(model, ctx.inputs(Chain()))
    model.set_reshard_after_forward(False)
    expected = "gather 0, gather 1, gather 2 | reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())
    model.set_reshard_after_forward(True, recurse=False)
    ctx.framework.child(model, "layers.1").set_reshard_after_forward(True)
    expected = "gather 0, gather 1, gather 2 | gather 1, reduce 2, reduce 1, reduce 0"
    check_schedule(ctx, model, expected, recipe=Chain())


@case("RSF-12", procs=(4,))
def each_unit_its_own_policy(ctx: Context) -> None:
    policies = {path: {"reshard_after_forward": policy} for path, policy in zip(UNITS, (True, 2, False), strict=True)}
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, by_unit=policies)
    expected = """gather root, gather 0, gather 1, gather 2
                | gather 1 over 2, reduce 2, gather 0, reduce 1, reduce root, reduce 0"""
    for _ in range(2):
        check_schedule(ctx, model, expected, recipe=Chain(own=True))


@case("RSF-12", procs=(1, 2, 4))
def gradients_of_units_with_policies_of_their_own(ctx: Context) -> None:
    policies = (ctx.world_size, True, False)
    by_unit = {path: {"reshard_after_forward": policy} for path, policy in zip(UNITS, policies, strict=True)}
    model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, by_unit=by_unit)
    for step in range(2):
        ctx.train(model, ctx.inputs(Chain(own=True), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(own=True), steps=range(2)), what="gradient")


@case("RSF-13", procs=(4,))
def an_int_with_parameters_split_along_dim_one(ctx: Context) -> None:
    def place(parameter: Any) -> Any:
        return ctx.framework.shard(1) if len(ctx.framework.shape(parameter)) == 2 else None

    model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=2, shard_placement_fn=place)
    for step in range(2):
        ctx.train(model, ctx.inputs(Chain(), step=step))
    check_arrays(ctx.gradients(model), ctx.true_gradients(Chain(), steps=range(2)), what="gradient")


@case("RSF-14", procs=(1, 2))
def the_setter_takes_a_bool(ctx: Context) -> None:
    model = ctx.shard(ctx.model(Chain()), units=UNITS)
    for wrong in (1, 2, None, "yes"):
        with check_raises(ValueError, containing="reshard_after_forward should be a bool"):
            model.set_reshard_after_forward(wrong)


@case("RSF-14", procs=(2, 4), reports=("pytorch/pytorch#149029",))
def a_root_that_the_setter_sets_is_freed(ctx: Context) -> None:
    expected = """gather root, gather 0, gather 1, gather 2
                | gather root, gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce root, reduce 0"""
    for trains_before in (False, True):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS)
        if trains_before:
            ctx.train(model, ctx.inputs(Chain(own=True)))
        model.set_reshard_after_forward(True)
        check_schedule(ctx, model, expected, recipe=Chain(own=True))
