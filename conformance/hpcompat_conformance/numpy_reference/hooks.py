"""What :mod:`hpcompat.core.around` asks of the tape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcompat.core.around import AroundForward
from hpcompat.core.tree import TensorTree
from hpcompat_conformance.numpy_reference import tape
from hpcompat_conformance.numpy_reference.ops import cast, watch

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit


def install(unit: Unit) -> None:
    for index, module in enumerate(unit.modules):
        # First in line: hooks of the user see what forward sees.
        module.hooks.insert(0, (partial(AROUND.before, unit, index), partial(AROUND.after, unit, index)))


class NumpyAround(AroundForward):
    tree = TensorTree(tape.Value, requires_grad=lambda value: value.requires_grad)

    def is_recording(self) -> bool:
        return tape.grad_enabled()

    def in_backward(self) -> bool:
        return tape.in_backward()

    def cast(self, tensor: tape.Value, dtype: Any) -> tape.Value:
        return cast(tensor, dtype=dtype)

    def watch_inputs(self, group: ParamGroup, tensors: Sequence[tape.Value]) -> Sequence[tape.Value]:
        # Through a node of their own, so that nothing outside the module delays post-backward.
        return watch(tensors, group.post_backward)

    def watch_output(self, unit: Unit, tensor: tape.Value) -> None:
        tensor.hooks.append(unit.pre_backward)


AROUND = NumpyAround()
