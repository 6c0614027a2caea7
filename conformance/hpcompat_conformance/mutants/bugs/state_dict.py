"""Saving and loading."""

from __future__ import annotations

from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

HOOKS = "hpcompat_torch.hooks"


@mutant("SDT-02")
def unsharded_parameters_in_a_state_dict(plant: Plant) -> None:
    """A state dict taken while a unit is unsharded holds the full parameters."""
    plant.instead(f"{HOOKS}:before_reading", lambda *args, **kwargs: None)


@mutant("SDT-03")
def loaded_values_are_not_gathered(plant: Plant) -> None:
    """load_state_dict fills tensors that the gathers do not read."""

    def detach(module: Any, *args: Any, **options: Any) -> None:
        for below in module.modules():
            unit = vars(below).get("_hpcompat_unit")
            for group in unit.groups if unit is not None else ():
                for param in group.tensors.params:
                    param.sharded_param._local_tensor = param.local_shard.clone()

    plant.before(f"{HOOKS}:TorchModuleMixin.load_state_dict", detach)
    plant.instead("hpcompat_torch.group:GroupTensors.rebind")


@mutant("SDT-01")
def a_state_dict_of_local_tensors(plant: Plant) -> None:
    """The values of a state dict have the shapes of this rank's shards, so that a checkpoint holds one rank's."""

    def with_hook(unit: Any) -> None:
        for module in unit.modules:
            module._register_state_dict_hook(_to_local)

    plant.after(f"{HOOKS}:install", with_hook)


def _to_local(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        state[name] = getattr(value, "_local_tensor", value)


@mutant("SDT-04")
def a_state_dict_of_copies(plant: Plant) -> None:
    """The values of a state dict are copies: one that is kept does not follow training."""

    def with_hook(unit: Any) -> None:
        for module in unit.modules:
            module._register_state_dict_hook(_to_copies)

    plant.after(f"{HOOKS}:install", with_hook)


def _to_copies(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        state[name] = value.clone()


@mutant("SDT-11")
def a_state_dict_takes_the_parameters_away(plant: Plant) -> None:
    """A state dict that is taken inside a forward reshards what is being computed with."""
    plant.around(f"{HOOKS}:before_reading", lambda original, group: lambda *args, **kwargs: group.to_sharded())


@mutant("SDT-12")
def parts_load_as_if_they_were_whole(plant: Plant) -> None:
    """load_state_dict takes this rank's part for the parameter's value, so a file of one rank gives wrong weights."""
    loading = "hpcompat_torch.loading"

    def take(original: Any, module: Any, state: Any, *, assign: bool) -> Any:
        taken = dict(state)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = taken.get(name)
            local = getattr(parameter, "_local_tensor", None)
            if value is not None and local is not None and value.shape == local.shape != parameter.shape:
                taken[name] = plant_like(value, parameter)
        return original(module, taken, assign=assign)

    plant.around(f"{loading}:shards_of", take)


def plant_like(local: Any, parameter: Any) -> Any:
    """A DTensor around ``local``."""
    from hpcompat_torch import loading

    return loading._like(local, parameter)


@mutant("SDT-13")
def parts_of_each_rank_do_not_load(plant: Plant) -> None:
    """load_local_state_dict loads nothing."""
    plant.instead("hpcompat_torch.training:load_local_state_dict")
