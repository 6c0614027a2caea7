"""`reset_iter_state` after something went wrong in a step, on all ranks alike."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check, check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context, steps
from hpcompat_conformance.training import trained

UNITS = ("layers.0", "layers.1", "layers.2")
RESET = ("FSDPModule.reset_iter_state",)
RECIPE = Chain(own=True)


class Trouble(Exception):
    """What goes wrong."""


class Fault:
    """Raises, once armed, after the forward of a submodule or when backward reaches the submodule's output."""

    def __init__(self, ctx: Context, model: Any, path: str, *, in_backward: bool) -> None:
        self.is_armed = False
        self._ctx, self._in_backward = ctx, in_backward
        ctx.framework.on_forward(ctx.framework.child(model, path), after=self._after)

    def strike(self, model: Any, inputs: Any) -> None:
        """Train on the inputs, in vain."""
        self.is_armed = True
        try:
            self._ctx.train(model, inputs)
        except Exception as error:
            if "in the middle" not in str(error):
                raise
        else:
            raise AssertionError("expected the step to fail, but it went well")
        finally:
            self.is_armed = False

    def _after(self, output: Any) -> None:
        if self.is_armed and self._in_backward:
            self._ctx.framework.on_gradient(output, self._raise)
        elif self.is_armed:
            self._raise()

    def _raise(self, gradient: Any = None) -> None:
        raise Trouble("in the middle of a step")


def check_recovery(ctx: Context, *, path: str, in_backward: bool, num_replicas: int = 1, **options: Any) -> None:
    """Fail in the second of four batches; the other three must leave the same bits as without it."""
    mesh = ctx.mesh() if num_replicas == 1 else ctx.mesh_2d(num_replicas)
    clean = trained(ctx, ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=mesh, **options), RECIPE, steps=(0, 2, 3))
    model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=mesh, **options)
    fault = Fault(ctx, model, path, in_backward=in_backward)

    def fail_after_the_first(step: int) -> None:
        if step == 0:
            fault.strike(model, ctx.inputs(RECIPE, step=1, rough=True))
            model.reset_iter_state()
            if in_backward:  # some units have reduced
                ctx.framework.zero_grad(model)

    found = trained(ctx, model, RECIPE, steps=(0, 2, 3), after_step=fail_after_the_first)
    where = f"{'backward' if in_backward else 'forward'} of {path or 'the root'} with {options}"
    check_arrays(found, clean, what=f"after a failure in {where}:")


@case("REC-01", procs=(1, 2, 4), requires=RESET, reports=("pytorch/torchtitan#1329",))
def after_a_failed_forward(ctx: Context) -> None:
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
        check_recovery(ctx, path="layers.1", in_backward=False, **options)


@case("REC-01", procs=(4,), requires=RESET, reports=("pytorch/torchtitan#1329",))
def after_a_failed_forward_under_hsdp_and_with_an_int(ctx: Context) -> None:
    check_recovery(ctx, path="layers.2", in_backward=False, num_replicas=2)
    check_recovery(ctx, path="layers.2", in_backward=False, reshard_after_forward=2)


@case("REC-02", procs=(1, 2, 4), requires=RESET, reports=("pytorch/torchtitan#1329",))
def after_a_failed_backward(ctx: Context) -> None:
    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
        for path in ("layers.1", ""):
            check_recovery(ctx, path=path, in_backward=True, **options)


@case("REC-02", procs=(4,), requires=RESET, reports=("pytorch/torchtitan#1329",))
def after_a_failed_backward_under_hsdp_and_with_an_int(ctx: Context) -> None:
    check_recovery(ctx, path="layers.0", in_backward=True, num_replicas=2)
    check_recovery(ctx, path="layers.0", in_backward=True, reshard_after_forward=2)


@case("REC-03", procs=(1, 2, 4), requires=RESET)
def gradients_without_synchronisation_are_dropped(ctx: Context) -> None:
    for reduce_dtype in (None, "float64"):
        policy = ctx.policy(reduce_dtype=reduce_dtype)
        model = ctx.shard(ctx.model(RECIPE), units=UNITS, mp_policy=policy)
        fault = Fault(ctx, model, "layers.0", in_backward=True)
        model.set_requires_gradient_sync(False)
        ctx.train(model, ctx.inputs(RECIPE, step=0))
        fault.strike(model, ctx.inputs(RECIPE, step=1))
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        ctx.train(model, ctx.inputs(RECIPE, step=2))
        truth = ctx.true_gradients(RECIPE, steps=(2,))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of the next batch with {policy}")


@case("REC-03", procs=(1, 2, 4), requires=RESET)
def between_two_microbatches(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    for step in range(2):
        model.set_requires_gradient_sync(False)
        ctx.train(model, ctx.inputs(RECIPE, step=10 + step))
        model.reset_iter_state()
        ctx.framework.zero_grad(model)
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            ctx.train(model, ctx.inputs(RECIPE, step=2 * step + microbatch))
        truth = ctx.true_gradients(RECIPE, steps=(2 * step, 2 * step + 1))
        check_arrays(ctx.gradients(model), truth, what=f"gradient of step {step}")


@case("REC-04", procs=(2, 4), requires=RESET, reports=("pytorch/torchtitan#1329",))
def partial_sums_are_dropped(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS, mesh=ctx.mesh_2d(2))
    model.set_requires_all_reduce(False)
    ctx.train(model, ctx.inputs(RECIPE, step=0))
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    ctx.train(model, ctx.inputs(RECIPE, step=1))
    check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE, steps=(1,)), what="gradient of the next batch")


@case("REC-05", procs=(1, 2, 4), requires=RESET)
def before_the_first_forward(ctx: Context) -> None:
    for unshards in (False, True):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS)
        if unshards:
            ctx.framework.child(model, "layers.1").unshard(async_op=True)
            ctx.framework.child(model, "layers.2").unshard()
        model.reset_iter_state()
        check_all_sharded(ctx, model)
        ctx.train(model, ctx.inputs(RECIPE))
        check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE), what="gradient")


@case("REC-06", procs=(1, 2), requires=RESET)
def not_on_the_root(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    ctx.train(model, ctx.inputs(RECIPE))
    with check_raises(RuntimeError, containing="must be called on the root"):
        ctx.framework.child(model, "layers.1").reset_iter_state()


@case("REC-07", procs=(2, 4), requires=RESET)
def forms_and_collectives_after_a_reset(ctx: Context) -> None:
    for in_backward in (False, True):
        for policy in (True, False):
            model = ctx.shard(ctx.model(Chain()), units=UNITS, reshard_after_forward=policy)
            first, second, third = (ctx.framework.child(model, path) for path in UNITS)
            first.set_modules_to_forward_prefetch([second, third])
            fault = Fault(ctx, model, "layers.1", in_backward=in_backward)
            fault.strike(model, ctx.inputs(Chain()))
            model.reset_iter_state()
            check_all_sharded(ctx, model)
            with ctx.record() as log:
                ctx.train(model, ctx.inputs(Chain()))
            gathers, reductions = "gather 0, gather 1, gather 2", "reduce 2, reduce 1, reduce 0"
            if policy:
                reductions = "gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce 0"
            expected = steps(f"{gathers} | {reductions}", over=ctx.world_size)
            check_equal(ctx.schedule(log), expected, what="collectives of the step after the reset")


@case("REC-08", procs=(1, 2, 4), requires=RESET)
def settings_and_gradients_stay(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    ctx.train(model, ctx.inputs(RECIPE, step=0))
    ctx.framework.child(model, "layers.1").set_requires_gradient_sync(False)
    ctx.framework.child(model, "layers.0").set_gradient_divide_factor(float(ctx.world_size))
    model.set_is_last_backward(False)
    model.reset_iter_state()
    model.set_is_last_backward(True)
    before = ctx.true_gradients(RECIPE, steps=(0,))
    check_arrays(ctx.gradients(model), before, what="gradient after the reset")
    ctx.train(model, ctx.inputs(RECIPE, step=1))
    both = ctx.true_gradients(RECIPE, steps=(0, 1))
    truth = {name: before[name] if name.startswith("layers.1.") else both[name] for name in both}
    check_arrays(ctx.gradients(model), truth, what="gradient with synchronisation off for layers.1")


@case("REC-09", procs=(1, 2), requires=RESET)
def fifty_times(ctx: Context) -> None:
    model = ctx.shard(ctx.model(RECIPE), units=UNITS)
    faults = [Fault(ctx, model, path, in_backward=is_late) for path in ("layers.1", "") for is_late in (False, True)]
    for attempt in range(48):
        faults[attempt % 4].strike(model, ctx.inputs(RECIPE, step=attempt))
        model.reset_iter_state()
        ctx.framework.zero_grad(model)
    ctx.train(model, ctx.inputs(RECIPE))
    check_arrays(ctx.gradients(model), ctx.true_gradients(RECIPE), what="gradient after 48 failures")


@case("REC-10", procs=(2, 4), requires=("agree", "FSDPModule.catch_up"), reports=("pytorch/torchtitan#1329",))
def one_rank_fails_and_all_drop_the_step(ctx: Context) -> None:
    batches = (0, 2, 3)
    clean = trained(ctx, ctx.shard(ctx.model(RECIPE), units=UNITS), RECIPE, steps=batches)
    for path, in_backward in (("layers.1", False), ("layers.1", True), ("", True)):
        model = ctx.shard(ctx.model(RECIPE), units=UNITS)
        fault = Fault(ctx, model, path, in_backward=in_backward)

        def drop_a_step(step: int, model: Any = model, fault: Fault = fault) -> None:
            if step == 0:
                start, inputs = model.begin_step(), ctx.inputs(RECIPE, step=1, rough=True)
                is_well = ctx.rank != ctx.world_size - 1
                if is_well:
                    ctx.train(model, inputs)
                else:
                    fault.strike(model, inputs)
                    with model.catch_up(start):
                        ctx.train(model, ctx.inputs(RECIPE))
                check_equal(ctx.api.agree(is_well), False, what="what the ranks agree on")
                model.reset_iter_state()
                ctx.framework.zero_grad(model)

        found = trained(ctx, model, RECIPE, steps=batches, after_step=drop_a_step)
        where = "backward" if in_backward else "forward"
        check_arrays(found, clean, what=f"after a step dropped in {where} of {path or 'the root'}:")


def check_all_sharded(ctx: Context, model: Any) -> None:
    """All parameters must be registered in their sharded form."""
    unsharded = [name for name, is_sharded in ctx.sharded(model).items() if not is_sharded]
    check(not unsharded, f"expected all parameters in their sharded form, but got {unsharded} in full")
