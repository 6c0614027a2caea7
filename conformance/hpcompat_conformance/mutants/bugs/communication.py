"""What a caller changes about the communication."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

MODULE = "hpcompat.module:HSDPModule"
TENSORS = "hpcompat_torch.group:GroupTensors"
REDUCTION = "hpcompat_torch.reduction:ReductionInFlight"


@mutant("COM-07")
def the_hook_comes_before_the_all_reduce(plant: Plant) -> None:
    """Under HSDP the all-reduce hook gets the sum of the shard axis only."""

    def too_early(reduction: Any, *, async_op: bool) -> None:
        hook = reduction.request.hook
        if hook is not None and reduction.request.all_reduce:
            reduction._wait_for_work()
            hook(reduction.output)
            reduction.request = dataclasses.replace(reduction.request, hook=None)

    plant.before(f"{REDUCTION}._all_reduce", too_early)


@mutant("COM-08")
def the_hook_sees_every_partial_sum(plant: Plant) -> None:
    """Under HSDP the all-reduce hook is called by backwards that do not all-reduce."""

    def call(reduction: Any) -> None:
        if reduction.request.hook is not None:
            reduction.request.hook(reduction.output)

    plant.before(f"{REDUCTION}._keep_partial", call)


@mutant("COM-05")
def custom_gathers_are_asynchronous(plant: Plant) -> None:
    """A custom all-gather is called with async_op=True by every forward."""

    def asynchronous(original: Any, tensors: Any, request: Any) -> Any:
        return original(tensors, dataclasses.replace(request, async_op=True))

    plant.around(f"{TENSORS}.all_gather", asynchronous)


@mutant("COM-01")
def the_input_is_no_part_of_the_output(plant: Plant) -> None:
    """A custom all-gather gets this rank's part in memory of its own: twice the memory, and no in-place gather."""

    def copied(original: Any, tensors: Any, request: Any) -> Any:
        output, part = original(tensors, request)
        return output, part.clone()

    plant.around(f"{TENSORS}._copy_in", copied)


@mutant("COM-03")
def custom_reduce_scatters_are_forgotten(plant: Plant) -> None:
    """A custom reduce-scatter allocates the buffers and is then not called."""

    def forget(reduction: Any, *, async_op: bool) -> None:
        reduction.request = dataclasses.replace(reduction.request, comm=None)

    plant.before(f"{REDUCTION}._reduce_scatter", forget)


@mutant("COM-10")
def the_event_is_kept(plant: Plant) -> None:
    """The event of set_post_optim_event is used by every forward from then on."""

    def keep(original: Any, unit: Any) -> bool:
        event = unit.iteration.post_optim_event
        is_root: bool = original(unit)
        unit.iteration.post_optim_event = event
        return is_root

    plant.around("hpcompat.core.unit:Unit._enter_root", keep)


@mutant("COM-13")
def a_separate_group_for_good(plant: Plant) -> None:
    """set_separate_reduce_scatter_group(False) does not go back to the shared group."""

    def only_on(original: Any, module: Any, enable: bool = True, **options: Any) -> None:
        if enable:
            original(module, enable, **options)

    plant.around(f"{MODULE}.set_separate_reduce_scatter_group", only_on)


@mutant("COM-15")
def contexts_are_not_shared(plant: Plant) -> None:
    """share_comm_ctx leaves each root its own context."""
    plant.instead("hpcompat:share_comm_ctx")


@mutant("COM-16")
def the_first_root_drops_the_rest(plant: Plant) -> None:
    """The end of one root's backward drops the reductions of the roots it shares a context with."""

    def drop(iteration: Any) -> None:
        ctx = iteration.units[0].comm_ctx
        pending = list(ctx._reductions)
        ctx._reductions.clear()
        for group, reduction in pending:
            if group.unit.iteration is iteration:
                ctx._reductions.append((group, reduction))
            else:
                reduction.abandon()

    plant.before("hpcompat.core.iteration:Iteration.final_callback", drop)


@mutant("COM-14", "RED-01")
def a_full_queue_forgets(plant: Plant) -> None:
    """When more reductions are on their way than buffers allow, the oldest is given up instead of waited for."""

    def abandon(ctx: Any) -> None:
        while len(ctx._reductions) >= ctx.max_input_buffers:
            ctx._reductions.popleft()[1].abandon()

    plant.before("hpcompat.core.comm_ctx:CommContext.make_room", abandon)


@mutant("COM-09")
def a_stream_under_hsdp(plant: Plant) -> None:
    """A stream for the all-reduce hook is accepted under HSDP, where another one is used."""

    def accept(original: Any, module: Any, hook: Any, *, stream: Any = None) -> None:
        original(module, hook)

    plant.around(f"{MODULE}.set_all_reduce_hook", accept)


@mutant("COM-06")
def custom_objects_for_the_first_mesh(plant: Plant) -> None:
    """On a unit with several meshes custom collectives are accepted, and used for the first one."""
    plant.around(f"{MODULE}._only_group", lambda original, module, method: module._unit().groups[:1])
