"""What the scheduler says that it does, against what it does."""

from __future__ import annotations

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
VERBS = {"unshard": "gather", "reduce": "reduce"}


@case("TRC-01", procs=(2, 4), requires=("record_events",))
def events_and_collectives(ctx: Context) -> None:
    for policy in (True, False):
        model = ctx.shard(ctx.model(Chain(own=True)), units=UNITS, reshard_after_forward=policy)
        ctx.train(model, ctx.inputs(Chain(own=True)))  # names are known after the first forward
        with ctx.record() as log, ctx.api.record_events() as events:
            ctx.train(model, ctx.inputs(Chain(own=True)))
        found = [
            f"{VERBS[event]} {unit.removeprefix('layers.') or 'root'} over {ctx.world_size}"
            for event, unit, _ in events
            if event in VERBS
        ]
        check_equal(found, ctx.schedule(log), what=f"gathers and reductions with reshard_after_forward={policy}")


@case("TRC-02", procs=(1, 2, 4), requires=("trace", "record_events"))
def tracing_changes_nothing(ctx: Context) -> None:
    recipe = Chain(own=True)
    expected = trained(ctx, ctx.shard(ctx.model(recipe), units=UNITS), recipe)
    model = ctx.shard(ctx.model(recipe), units=UNITS)
    with ctx.api.record_events() as events, ctx.api.trace(model) as recording:
        found = trained(ctx, model, recipe)
    check_arrays(found, expected, what="while tracing:")
    check_equal([tuple(event) for event in recording.events], [tuple(event) for event in events], what="events")
    check(len(events) > 0, "expected events, but there are none")
    with ctx.api.record_events() as nothing:
        pass
    ctx.train(model, ctx.inputs(recipe))
    check_equal(nothing, [], what="events after recording")
