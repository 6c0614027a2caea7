"""Module hooks and the tape, translated into calls of the scheduler's units and param groups.

forward pre-hook                        unit.pre_forward, then cast the inputs, then
gradient of the inputs is complete      group.post_backward, the last group first
forward post-hook                       unit.post_forward, then cast the output
first gradient of an output             unit.pre_backward of every unit that the output completes
end of backward                         the final callback that pre_backward queued
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hpcompat.core.states import ForwardEntry
from hpcompat_conformance.numpy_reference import tape
from hpcompat_conformance.numpy_reference.ops import cast, map_values, values_with_grad, watch

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def install(unit: Unit) -> None:
    for index, module in enumerate(unit.modules):
        # First in line: hooks of the user see what forward sees.
        module.hooks.insert(0, (partial(before_forward, unit, index), partial(after_forward, unit, index)))


def before_forward(unit: Unit, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    entry = unit.pre_forward(index)
    inputs: Inputs = (args, kwargs)
    if unit.mp_policy.cast_forward_inputs and unit.mp_policy.param_dtype is not None:
        inputs = map_values(partial(cast, dtype=unit.mp_policy.param_dtype), inputs)
    if entry in (ForwardEntry.FIRST, ForwardEntry.ROOT) and tape.grad_enabled():
        for group in unit.groups:
            inputs = watch_inputs(group, inputs)
    return inputs


def watch_inputs(group: ParamGroup, inputs: Inputs) -> Inputs:
    """The inputs through a node of their own, so that nothing outside the module delays post-backward."""
    watched = iter(watch(values_with_grad(inputs), group.post_backward))
    return map_values(lambda value: next(watched) if value.requires_grad else value, inputs)  # type: ignore[no-any-return]


def after_forward(unit: Unit, index: int, output: Any) -> Any:
    records = tape.grad_enabled()
    for completed in unit.post_forward(index, in_backward=tape.in_backward(), records=records):
        for value in values_with_grad(output) if records else []:
            value.hooks.append(completed.pre_backward)
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else map_values(partial(cast, dtype=dtype), output)
