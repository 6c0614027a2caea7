"""After an exception."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

RESET = "hpcompat.core.param_group:ParamGroup.reset_iter_state"
ITERATION = "hpcompat.core.iteration:Iteration.reset"


def keeping(plant: Plant, *names: str) -> None:
    """Plant a reset that leaves these attributes of every parameter as they are."""

    def leave(original: Any, group: Any) -> None:
        kept = [(param, name, getattr(param, name)) for param in group.tensors.params for name in names]
        original(group)
        for param, name, value in kept:
            setattr(param, name, value)

    plant.around(RESET, leave)


@mutant("REC-03")
def reset_keeps_unreduced_gradients(plant: Plant) -> None:
    """reset_iter_state() leaves the gradients of microbatches on the full parameters: the next step adds them."""

    def leave(original: Any, group: Any) -> None:
        kept = [None if p.unsharded_param is None else p.unsharded_param.grad for p in group.tensors.params]
        original(group)
        for param, grad in zip(group.tensors.params, kept, strict=True):
            if grad is not None:
                param.unsharded_param.grad = grad

    plant.around(RESET, leave)


@mutant("REC-03")
def reset_keeps_accumulated_gradients(plant: Plant) -> None:
    """reset_iter_state() leaves what was accumulated in the reduce dtype."""
    keeping(plant, "accumulated_grad")


@mutant("REC-04")
def reset_keeps_partial_sums(plant: Plant) -> None:
    """reset_iter_state() leaves the partial sums of HSDP."""
    keeping(plant, "partial_grad")


@mutant("REC-07", "REC-05")
def reset_leaves_parameters_gathered(plant: Plant) -> None:
    """reset_iter_state() does not free what the failed step had gathered."""

    def leave(original: Any, group: Any) -> None:
        was_unsharded = group.is_unsharded
        original(group)
        if was_unsharded:
            group.unshard()
            group.wait_for_unshard()

    plant.around(RESET, leave)


@mutant("REC-07")
def reset_keeps_the_order_of_forward(plant: Plant) -> None:
    """After reset_iter_state() backward prefetches by the order of the failed forward."""

    def leave(original: Any, iteration: Any) -> None:
        order = list(iteration.units[0].comm_ctx.post_forward_order) if iteration.units else []
        original(iteration)
        if iteration.units:
            iteration.units[0].comm_ctx.post_forward_order.extend(order)

    plant.around(ITERATION, leave)


@mutant("REC-02")
def reset_forgets_the_final_callback(plant: Plant) -> None:
    """After an exception in backward the next backward does not finish: its end counts as queued already."""

    def leave(original: Any, iteration: Any) -> None:
        is_queued = iteration.final_callback_queued
        original(iteration)
        iteration.final_callback_queued = is_queued

    plant.around(ITERATION, leave)


@mutant("REC-02", "REC-01")
def reset_forgets_what_is_on_its_way(plant: Plant) -> None:
    """reset_iter_state() lets the reductions of the failed step arrive in the next one."""

    def leave(original: Any, ctx: Any) -> None:
        pending = list(ctx._reductions)
        ctx._reductions.clear()
        original(ctx)
        ctx._reductions.extend(pending)

    plant.around("hpcompat.core.comm_ctx:CommContext.reset", leave)


@mutant("REC-06")
def reset_anywhere(plant: Plant) -> None:
    """reset_iter_state() on a unit below the root is accepted, and resets half a tree."""
    plant.around("hpcompat.recovery:Recovery._root", lambda original, module, method: module._unit())


@mutant("REC-08")
def reset_clears_the_gradients_of_the_shards(plant: Plant) -> None:
    """reset_iter_state() drops the gradients of the steps before."""

    def clear(group: Any) -> None:
        for param in group.tensors.params:
            param.sharded_param.grad = None

    plant.after(RESET, clear)


@mutant("REC-08")
def reset_changes_settings(plant: Plant) -> None:
    """reset_iter_state() switches synchronisation on again."""

    def default(group: Any) -> None:
        group.reduce_grads = group.all_reduce_grads = True

    plant.after(RESET, default)
