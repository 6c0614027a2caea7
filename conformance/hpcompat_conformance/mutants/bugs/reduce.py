"""What is added up over which ranks, and divided by what."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

PLAN = "hpcompat.core.division:divide_plan"
REDUCTION = "hpcompat_torch.reduction:ReductionInFlight"


def sum_op() -> Any:
    """The sum among the reductions."""
    from hpcompat.comm import ReduceOp

    return ReduceOp.SUM


@mutant("RED-01")
def sum_instead_of_mean(plant: Plant) -> None:
    """Gradients are added up and not divided."""

    def undivided(original: Any, request: Any) -> Any:
        return dataclasses.replace(original(request), scatter_op=sum_op(), all_reduce_op=sum_op())

    plant.around(PLAN, undivided)


@mutant("RED-02")
def wrong_divide_on_hsdp(plant: Plant) -> None:
    """Under HSDP the gradient is divided by the size of the shard axis only."""

    def by_the_shard_axis(original: Any, request: Any) -> Any:
        return dataclasses.replace(original(request), all_reduce_op=sum_op())

    plant.around(PLAN, by_the_shard_axis)


@mutant("RED-02", "SCH-01")
def all_reduce_over_the_wrong_group(plant: Plant) -> None:
    """HSDP's all-reduce runs over the shard axis."""

    def confuse(info: Any) -> None:
        info.replicate_process_group = info.shard_process_group

    plant.after("hpcompat.mesh:HSDPMeshInfo.__post_init__", confuse)


@mutant("RED-02")
def no_all_reduce(plant: Plant) -> None:
    """Under HSDP each replica keeps the sum of its own ranks."""
    plant.instead(f"{REDUCTION}._all_reduce")


@mutant("RED-03")
def the_divide_factor_is_ignored(plant: Plant) -> None:
    """set_gradient_divide_factor changes nothing."""
    plant.around(PLAN, lambda original, request: original(dataclasses.replace(request, factor=None)))


@mutant("RED-06", "RED-03")
def the_divide_factor_is_applied_twice(plant: Plant) -> None:
    """Over a shard axis of size 1 the gradient is divided by the factor before and after the all-reduce."""

    def twice(original: Any, request: Any) -> Any:
        plan = original(request)
        if request.factor is None or request.shard_world_size > 1:
            return plan
        return dataclasses.replace(plan, pre=request.factor, post=plan.post or request.factor)

    plant.around(PLAN, twice)


@mutant("RED-03")
def a_new_divide_factor_comes_too_late(plant: Plant) -> None:
    """A divide factor that is set after the first backward is not used."""

    def keep_plans(original: Any, division: Any, **settings: Any) -> None:
        plans = dict(division._plans)
        original(division, **settings)
        division._plans.update(plans)

    plant.around("hpcompat.core.division:Division.set", keep_plans)


@mutant("RED-11")
def ranks_do_not_ask_what_the_others_reduce(plant: Plant) -> None:
    """Each rank reduces the gradients that it has, whatever those of the others are."""

    def ask_nobody(original: Any, *args: Any) -> None:
        return None

    plant.around("hpcompat.core.agreement:Agreement.before_reduction", ask_nobody)


@mutant("RED-12")
def a_queued_reduction_reads_the_settings_of_today(plant: Plant) -> None:
    """A reduction divides by what is set when it is completed, not by what was set when it began."""

    def read_again(ctx: Any, group: Any, reduction: Any) -> None:
        is_narrow = reduction.output.dtype.itemsize == 2 and "bfloat" not in str(reduction.output.dtype)
        reduction.request = dataclasses.replace(reduction.request, plan=group.division.plan(is_narrow))

    plant.before("hpcompat.core.comm_ctx:CommContext._retire", read_again)


@mutant("RED-12")
def all_units_divide_as_the_first_does(plant: Plant) -> None:
    """The settings of one unit's division are used for all units."""
    plans: list[Any] = []

    def share(original: Any, division: Any, overflow_risk: bool) -> Any:
        plans.append(original(division, overflow_risk))
        return plans[0]

    plant.around("hpcompat.core.division:Division.plan", share)


@mutant("RED-01")
def one_ulp(plant: Plant) -> None:
    """The lowest bit of one element is flipped in every fifth gradient on the last rank."""
    calls = [0]

    def flip(original: Any, param: Any, grad: Any, **options: Any) -> None:
        if grad.numel() > 0 and param.rank == param.world_size - 1:
            calls[0] += 1
            if calls[0] % 5 == 0:
                grad = grad.clone()
                grad.view(-1)[-1:].copy_(grad.view(-1)[-1:].nextafter(grad.new_tensor([float("inf")])))
        original(param, grad, **options)

    plant.around("hpcompat_torch.param:ShardedParam.deliver", flip)


@mutant("RED-01", "SCH-01")
def skip_the_final_wait(plant: Plant) -> None:
    """Backward returns while the last reduction is on its way, so its gradients are missing."""

    def leave_one(original: Any, ctx: Any, *, is_last: bool) -> None:
        pending = ctx._reductions.pop() if ctx._reductions else None
        original(ctx, is_last=is_last)
        if pending is not None:
            ctx._reductions.append(pending)

    plant.around("hpcompat.core.comm_ctx:CommContext.end_backward", leave_one)


@mutant("RED-13")
def divide_the_gradients_in_place(plant: Plant) -> None:
    """The reduction divides the gradients it is given in place, before it copies them."""

    def in_place(original: Any, bucket: Any, request: Any, **options: Any) -> Any:
        plan = request.plan
        size = request.shard_world_size
        if plan.scatter_op.name != "AVG" or size == 1 or request.all_reduce_group is not None:
            return original(bucket, request, **options)
        for grad in bucket.grads:
            grad.div_(size)
        plan = dataclasses.replace(plan, scatter_op=sum_op())
        return original(bucket, dataclasses.replace(request, plan=plan), **options)

    plant.around("hpcompat_torch.gradients:start_reduce", in_place)


@mutant("RED-07")
def unused_parameters_get_zeros(plant: Plant) -> None:
    """A parameter that no rank used gets a gradient of zeros, which an optimizer with weight decay acts on."""

    def filled(original: Any, tensors: Any, *, fill_unused: bool) -> Any:
        return original(tensors, fill_unused=True)

    plant.around("hpcompat_torch.group:GroupTensors.take_gradients", filled)


@mutant("RED-08", "PLC-02")
def a_shard_too_few(plant: Plant) -> None:
    """The last rank's part of the reduced gradients is lost."""

    def lose(reduction: Any) -> None:
        if reduction.params[0].rank == reduction.params[0].world_size - 1:
            reduction.output.zero_()

    plant.before(f"{REDUCTION}._deliver", lose)


@mutant("RED-02", "RPL-02")
def replicas_drift_apart(plant: Plant) -> None:
    """Every second all-reduce is left out, as if its result were known already."""
    calls = [0]

    def every_other(original: Any, reduction: Any, *, async_op: bool) -> None:
        calls[0] += 1
        if calls[0] % 2:
            original(reduction, async_op=async_op)

    plant.around(f"{REDUCTION}._all_reduce", every_other)


@mutant("RED-14")
def every_transport_is_taken_to_average(plant: Plant) -> None:
    """A reduction asks any process group for an average, whatever is known of it."""

    def all_of_them(original: Any, *args: Any, **options: Any) -> Any:
        from hpcompat.comm import ReduceOp

        return original(*args, **options) | {ReduceOp.AVG}

    plant.around("hpcompat_torch.transport:supported_reductions", all_of_them)
