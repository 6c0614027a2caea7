"""Ways into a unit, roots, lists of modules, shared parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat.core.unit import unit_of
from hpcompat_conformance.mutants.plant import Plant, mutant

UNIT = "hpcompat.core.unit:Unit"


@mutant("ENT-01")
def registered_methods_do_not_gather(plant: Plant) -> None:
    """register_fsdp_forward_method does nothing, so that the method meets sharded parameters."""
    plant.instead("hpcompat:register_fsdp_forward_method")


@mutant("ENT-01")
def registered_methods_never_free(plant: Plant) -> None:
    """A method registered with register_fsdp_forward_method gathers before and does not free afterwards."""

    def half(original: Any, module: Any, method_name: str) -> None:
        before = getattr(module, method_name, None)
        original(module, method_name)
        if before is None or getattr(module, method_name) == before:
            return
        unit = module._unit()

        def gathers_only(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = unit.backend.before_forward(unit, 0, args, kwargs)
            return before(*args, **kwargs)

        setattr(module, method_name, gathers_only)

    plant.around("hpcompat:register_fsdp_forward_method", half)


@mutant("ENT-03")
def parameters_in_two_units(plant: Plant) -> None:
    """A parameter that two units share is accepted: it trains as two parameters."""
    plant.instead("hpcompat.core.wrap:_check_not_managed")


@mutant("LIF-07", "ENT-03")
def a_tied_parameter_in_one_place_only(plant: Plant) -> None:
    """Of the modules that share a parameter only the first gets the gathered one."""

    def first_place(param: Any, parameter: Any) -> None:
        module, attribute = param.places[0]
        module._parameters[attribute] = parameter

    plant.around(
        "hpcompat_torch.param:ShardedParam.register", lambda original, param, parameter: first_place(param, parameter)
    )


@mutant("ENT-05")
def gathered_after_the_pre_hooks(plant: Plant) -> None:
    """Pre-hooks that a module had before it was wrapped see sharded parameters."""

    def to_the_end(unit: Any) -> None:
        for module in unit.modules:
            first = next(iter(module._forward_pre_hooks))
            module._forward_pre_hooks.move_to_end(first)

    plant.after("hpcompat_torch.hooks:install", to_the_end)


@mutant("LIF-09")
def wrapped_twice(plant: Plant) -> None:
    """A second fully_shard on a module is accepted."""
    plant.instead("hpcompat.core.wrap:_check_module")


@mutant("ENT-13")
def a_second_root(plant: Plant) -> None:
    """A unit that has run as a root is taken into another tree, and its reductions are lost from the first."""

    def forget(original: Any, root: Any, **options: Any) -> None:
        for _, module in root.backend.named_modules(root.modules[0]):
            unit = unit_of(module)
            if unit is not None:
                unit.is_root = None
        original(root, **options)

    plant.around("hpcompat.core.unit:init_root", forget)


@mutant("ENT-14")
def a_list_as_a_root(plant: Plant) -> None:
    """The forward of a list of modules without a root above it is accepted."""

    def accept(original: Any, root: Any, **options: Any) -> None:
        modules, root.modules = root.modules, root.modules[:1]
        try:
            original(root, **options)
        finally:
            root.modules = modules

    plant.around("hpcompat.core.unit:init_root", accept)


@mutant("LIF-11")
def a_list_freed_after_its_first_member(plant: Plant) -> None:
    """A unit of several modules is freed when the first of them has run."""

    def complete(unit: Any, index: int = 0, **options: Any) -> None:
        if len(unit._to_run) > 1:
            unit._to_run = {index}

    plant.before(f"{UNIT}.post_forward", complete)


@mutant("LIF-11")
def a_list_run_in_part_is_left_open(plant: Plant) -> None:
    """A unit of several modules of which some did not run is not finished at the end of the forward."""
    plant.instead(f"{UNIT}._complete_open_units", [])


@mutant("ENT-08")
def a_deepcopy_that_is_none(plant: Plant) -> None:
    """copy.deepcopy of a wrapped module gives the module itself: an averaged copy then trains along."""
    plant.around("hpcompat.module:HSDPModule.__deepcopy__", lambda original, module, memo: module)


@mutant("ENT-10")
def any_two_axes_are_hsdp(plant: Plant) -> None:
    """A mesh of two axes is taken for HSDP whatever its axes are called."""
    plant.instead("hpcompat.mesh:_refuse_ambiguous")


@mutant("ENT-11")
def ignored_parameters_are_sharded(plant: Plant) -> None:
    """ignored_params changes nothing."""

    def all_of_them(original: Any, backend: Any, managed: Any, options: Any) -> Any:
        return original(backend, managed, dataclasses.replace(options, ignored_params=frozenset()))

    plant.around("hpcompat.core.wrap:_managed_parameters", all_of_them)


@mutant("FWD-01")
def nested_outputs_are_not_seen(plant: Plant) -> None:
    """A unit whose output is a dict or a tuple is not gathered for its backward."""

    def tensors_only(original: Any, around: Any, unit: Any, output: Any) -> Any:
        return original(around, unit, output) if hasattr(output, "register_hook") else output

    plant.around("hpcompat.core.around:AroundForward.watch_outputs", tensors_only)


@mutant("BWD-01")
def the_input_gets_no_gradient(plant: Plant) -> None:
    """The inputs of a root are cut off from what made them."""

    def detached(original: Any, around: Any, unit: Any, index: int, args: Any, kwargs: Any) -> Any:
        is_root = unit.iteration.forward_root is None
        args, kwargs = original(around, unit, index, args, kwargs)
        return (tuple(getattr(arg, "detach", lambda arg=arg: arg)() for arg in args) if is_root else args), kwargs

    plant.around("hpcompat.core.around:AroundForward.before", detached)


@mutant("ENT-15")
def classes_of_another_name(plant: Plant) -> None:
    """Wrapped classes have a prefix that consumers, who strip FSDP, do not know."""

    def renamed(original: Any, module_class: type, prefix: str, *mixins: type) -> type:
        return original(module_class, "HSDP", *mixins)

    plant.around("hpcompat.core.wrap:_mixed_class", renamed)
