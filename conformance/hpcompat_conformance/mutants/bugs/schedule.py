"""When what is gathered and reduced."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

PREFETCH = "hpcompat.core.prefetch"


@mutant("SCH-02")
def prefetch_the_wrong_unit(plant: Plant) -> None:
    """Backward always prefetches the unit that ran first in forward."""

    def first_of_all(original: Any, group: Any) -> None:
        from hpcompat.contract.states import TrainingState
        from hpcompat.core import prefetch

        prefetch.prefetch(group.comm_ctx.post_forward_order[0], TrainingState.PRE_BACKWARD)

    plant.around(f"{PREFETCH}:prefetch_previous", first_of_all)


@mutant("SCH-02")
def no_prefetch_in_backward(plant: Plant) -> None:
    """Backward gathers each unit when it gets there: no overlap."""
    plant.instead(f"{PREFETCH}:prefetch_previous")


@mutant("SCH-06")
def forward_prefetch_in_reverse(plant: Plant) -> None:
    """A forward prefetch list is worked off from its end."""
    plant.around(f"{PREFETCH}:prefetch_forward", lambda original, units: original(list(units)[::-1]))


@mutant("SCH-07")
def the_list_comes_on_top_of_the_guess(plant: Plant) -> None:
    """A unit with a backward prefetch list prefetches the unit that ran before it as well."""

    def both(units: Any) -> None:
        from hpcompat.contract.states import TrainingState
        from hpcompat.core import prefetch

        for unit in list(units):
            order = unit.comm_ctx.post_forward_order
            if len(order) > 1:
                prefetch.prefetch(order[-2], TrainingState.PRE_BACKWARD)

    plant.before(f"{PREFETCH}:prefetch_backward", both)


@mutant("PLC-07")
def prefetch_of_one_mesh_only(plant: Plant) -> None:
    """Of a unit with several meshes a prefetch list gathers the first one's parameters only."""

    def first_group(original: Any, group: Any, state: Any) -> None:
        if group.index == 0:
            original(group, state)

    plant.around(f"{PREFETCH}:prefetch", first_group)


@mutant("PLC-06")
def meshes_reduced_in_forward_order(plant: Plant) -> None:
    """The meshes of a unit are reduced in the order of forward instead of the other way round."""

    def turned(original: Any, unit: Any) -> None:
        unit.groups.reverse()
        try:
            original(unit)
        finally:
            unit.groups.reverse()

    def in_order(original: Any, around: Any, unit: Any, group: Any, args: Any, kwargs: Any) -> Any:
        # Autograd runs what was attached last first.
        return original(around, unit, unit.groups[len(unit.groups) - 1 - group.index], args, kwargs)

    plant.around("hpcompat.core.unit:Unit.end_backward", turned)
    plant.around("hpcompat.core.around:AroundForward._watch_inputs", in_order)


@mutant("SCH-04", "COM-04")
def one_process_communicates(plant: Plant) -> None:
    """Over a shard axis of size 1 parameters go through a collective all the same."""

    def needlessly(original: Any, tensors: Any, request: Any) -> Any:
        if request.world_size == 1 and request.group is not None:
            from hpcompat_torch import collectives

            output = tensors.params[0].shard_data.clone()
            collectives.all_gather(output, tensors.params[0].shard_data, group=request.group, async_op=False)
        return original(tensors, request)

    plant.around("hpcompat_torch.group:GroupTensors.all_gather", needlessly)


@mutant("SCH-03")
def padded_to_a_round_number(plant: Plant) -> None:
    """Each rank's part of a reduction is padded to a round number: right gradients, needless traffic."""

    def padded(original: Any, output: Any, input: Any, **options: Any) -> None:
        world_size = input.numel() // output.numel()
        rows = input.new_zeros(world_size, -(-output.numel() // 64) * 64)
        rows[:, : output.numel()] = input.view(world_size, -1)
        wide = rows.new_empty(rows.size(1))
        original(wide, rows.view(-1), **{**options, "async_op": False})
        output.copy_(wide[: output.numel()])

    plant.around("hpcompat_torch.collectives:reduce_scatter", padded)
