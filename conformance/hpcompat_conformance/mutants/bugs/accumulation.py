"""Several backwards before a step."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

GROUP = "hpcompat_torch.group:GroupTensors"
MODULE = "hpcompat.module:HSDPModule"


@mutant("ACC-02", "ACC-08")
def drop_a_microbatch(plant: Plant) -> None:
    """Every third backward without synchronisation loses what has been accumulated."""
    calls: dict[int, int] = {}

    def drop(tensors: Any) -> None:
        calls[id(tensors)] = calls.get(id(tensors), 0) + 1
        if calls[id(tensors)] % 3 == 0:
            tensors.drop_gradients()

    plant.after(f"{GROUP}.stash_gradients", drop)


@mutant("ACC-01", "ACC-03")
def ignore_requires_gradient_sync(plant: Plant) -> None:
    """Every backward reduces, whatever set_requires_gradient_sync says."""

    def synchronise(original: Any, module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(module, True, recurse=recurse)

    plant.around(f"{MODULE}.set_requires_gradient_sync", synchronise)


@mutant("ACC-04")
def all_reduce_each_microbatch(plant: Plant) -> None:
    """Under HSDP every backward all-reduces, whatever set_requires_all_reduce says."""

    def all_reduce(original: Any, module: Any, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        original(module, True, recurse=recurse)

    plant.around(f"{MODULE}.set_requires_all_reduce", all_reduce)


@mutant("ACC-01")
def synchronisation_only_on_the_root(plant: Plant) -> None:
    """set_requires_gradient_sync does not reach the units below."""

    def on_its_own(original: Any, module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(module, requires_gradient_sync, recurse=False)

    plant.around(f"{MODULE}.set_requires_gradient_sync", on_its_own)


@mutant("ACC-02", "ACC-04")
def no_all_reduce_after_accumulation(plant: Plant) -> None:
    """Switching synchronisation on again forgets the all-reduce of HSDP."""

    def without_all_reduce(original: Any, module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(module, requires_gradient_sync, recurse=recurse)
        module.set_requires_all_reduce(False, recurse=recurse)

    plant.around(f"{MODULE}.set_requires_gradient_sync", without_all_reduce)


@mutant("ACC-08", "ACC-05")
def pending_gradients_are_not_cleared(plant: Plant) -> None:
    """The gradients of the full parameters stay after they were reduced: the next step adds them again."""

    def take(original: Any, tensors: Any, **options: Any) -> Any:
        kept = [None if p.unsharded_param is None else p.unsharded_param.grad for p in tensors.params]
        buckets = original(tensors, **options)
        for param, grad in zip(tensors.params, kept, strict=True):
            if grad is not None:
                param.unsharded_param.grad = grad
        return buckets

    plant.around(f"{GROUP}.take_gradients", take)


@mutant("ACC-08")
def accumulated_gradients_are_not_cleared(plant: Plant) -> None:
    """What was accumulated in the reduce dtype in one step is added again in the next."""

    def take(original: Any, tensors: Any, **options: Any) -> Any:
        kept = [None if p.accumulated_grad is None else p.accumulated_grad.clone() for p in tensors.params]
        buckets = original(tensors, **options)
        for param, grad in zip(tensors.params, kept, strict=True):
            param.accumulated_grad = grad
        return buckets

    plant.around(f"{GROUP}.take_gradients", take)


@mutant("ACC-06")
def accumulate_in_the_parameter_dtype(plant: Plant) -> None:
    """Microbatches are added up in bfloat16 although the reduce dtype is float32."""
    plant.instead(f"{GROUP}.stash_gradients")


@mutant("ACC-04")
def only_the_last_partial_sum(plant: Plant) -> None:
    """Under HSDP each partial sum replaces the one before it."""

    def forget(reduction: Any) -> None:
        for param in reduction.params:
            param.partial_grad = None

    plant.before("hpcompat_torch.reduction:ReductionInFlight._keep_partial", forget)


@mutant("ACC-05")
def a_gradient_replaces_the_one_before(plant: Plant) -> None:
    """A synchronised backward overwrites the gradients that are there."""

    def forget(param: Any, grad: Any, **options: Any) -> None:
        param.sharded_param.grad = None

    plant.before("hpcompat_torch.param:ShardedParam.deliver", forget)


@mutant("ACC-07", "ACC-02")
def the_last_microbatch_is_left_out(plant: Plant) -> None:
    """The reducing backward takes what was accumulated and not its own gradient."""

    def forget(tensors: Any) -> None:
        for param in tensors.params:
            if param.accumulated_grad is not None and param.unsharded_param is not None:
                param.unsharded_param.grad = None

    plant.before(f"{GROUP}.accumulate_gradients", forget)
