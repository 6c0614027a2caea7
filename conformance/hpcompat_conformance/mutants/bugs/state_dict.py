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
