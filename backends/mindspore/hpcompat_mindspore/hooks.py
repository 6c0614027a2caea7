"""Cell hooks and autograd, translated into calls of the scheduler's unit and param groups.

[Note: post-backward]
A group's post-backward must run when the gradients of the cell's inputs are ready, not later: a residual connection
around the cell would delay a hook on the input. So the inputs that require grad go through a node of their own, whose
backward waits for all of them. MindSpore runs nodes latest first and a parameter's hook before any node, as torch does,
so all gradients of the group are there by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from hpcompat.core.around import AroundForward
from hpcompat.core.state_dict import after_reading, before_loading, before_reading
from hpcompat.core.tree import TensorTree
from hpcompat.core.unit import unit_of
from hpcompat_mindspore import autograd, gradients, loading
from hpcompat_mindspore.param import ShardedParam, mark, param_of
from hpcompat_mindspore.tensors import cast_floating, memory_of

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedGroup, HookedUnit


def install(unit: HookedUnit) -> None:
    """Hooks on every cell of ``unit``: forward, state dict, load."""
    AROUND.install(unit)
    for group in unit.groups:
        params = group.tensors.params  # type: ignore[attr-defined]
        for param in params:
            param.owner = group
        for module in dict.fromkeys(module for param in params for module, _ in param.places):
            module.register_state_dict_pre_hook(before_reading(group))
            module.register_state_dict_post_hook(after_reading(group, shard_of=_shard_of))
            module.register_load_state_dict_pre_hook(_load_hook(group))
    for module in unit.modules:
        for _, parameter in loading.named_places(module):
            gradients.make_gradient_own(parameter, memory_of(unit.device))


def _shard_of(param: ShardedParam, value: Tensor) -> Tensor:
    return mark(param.shard, param)


def _load_hook(group: HookedGroup) -> Callable[..., None]:
    reshard = before_loading(group)

    def load_hook(cell: nn.Cell, state: Any, prefix: str, *rest: Any) -> None:
        reshard()
        loading.refuse_in(cell, state, prefix, messages=rest[-1])

    return load_hook


# Forward


class MindSporeAround(AroundForward):
    """What :mod:`hpcompat.core.around` asks of MindSpore."""

    tree = TensorTree(Tensor, requires_grad=autograd.requires_grad, atoms=(mindspore.Type,), opaque=(nn.Cell,))

    def begin(self, unit: HookedUnit) -> None:
        autograd.resume_recording()

    def is_recording(self) -> bool:
        return autograd.is_recording()

    def in_backward(self) -> bool:
        return autograd.in_backward()

    def cast(self, tensor: Tensor, dtype: Any) -> Tensor:
        return cast_floating(tensor, dtype)

    def enter_root(self, unit: HookedUnit) -> None:
        autograd.forget_shapes()

    def leave_root(self, unit: HookedUnit) -> None:
        autograd.forget_shapes()

    def watch_inputs(self, group: HookedGroup, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return autograd.watch(tensors, group.post_backward)

    def watch_output(self, unit: HookedUnit, tensor: Tensor) -> None:
        tensor.register_hook(lambda grad: unit.pre_backward())


AROUND = MindSporeAround()


# Cell methods


class MindSporeModuleMixin:
    """What a wrapped ``nn.Cell`` does differently; stands between ``HSDPModule`` and the original class."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unit = unit_of(self)
        if unit is None:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.to_sharded_for_loading()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.tensors.rebind()  # type: ignore[attr-defined]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters at and below this cell, those that still wait for their reduction and
        ``main_grad`` included. Cells have no such method of their own.
        """
        for _, parameter in loading.named_places(self):
            parameter._grad = None
            if param_of(parameter) is not None:
                parameter.grad = None
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad = None
        for unit in loading.units_below(self):
            for group in unit.groups:
                group.tensors.drop_gradients()

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """As ``nn.Cell.load_state_dict``; a value for a sharded parameter is one of a state dict, which knows that it
        is a shard, or a tensor of the global shape (every rank passes the whole tensor). Parts that each rank has saved
        for itself are loaded by :func:`hpcompat.load_local_state_dict`.

        Raises:
            StateDictError: a value has another shape. Nothing is loaded then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, names and values, but got {state_dict!r}")
        loading.reshard_below(self)
        loaded = loading.shards_of(self, state_dict)
        result = super().load_state_dict(loaded, strict=strict)  # type: ignore[misc]
        loading.rebind_below(self)
        return result
