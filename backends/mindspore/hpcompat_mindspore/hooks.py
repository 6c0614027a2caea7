"""Cell hooks and autograd, translated into calls of the scheduler's unit and param groups.

[Note: post-backward]
A group's post-backward must run when the gradients of the cell's inputs are ready, not later: a residual connection
around the cell would delay a hook on the input. So the inputs that require grad go through a node of their own, whose
backward waits for all of them. MindSpore runs nodes latest first and a parameter's hook before any node, as torch does,
so all gradients of the group are there by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from hpcompat.core.outputs import check_hidden_tensors
from hpcompat.core.states import ForwardEntry
from hpcompat.core.unit import unit_of
from hpcompat.errors import StateDictError
from hpcompat_mindspore import autograd, gradients
from hpcompat_mindspore.param import param_of
from hpcompat_mindspore.tensors import cast_floating, memory_of
from hpcompat_mindspore.tree import hidden_tensor_owner, map_tensors, tensors_with_grad

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def install(unit: Unit) -> None:
    """Hooks on every cell of ``unit``: forward, state dict, load."""
    is_list = len(unit.modules) > 1
    for index, module in enumerate(unit.modules):
        module.register_forward_pre_hook(_pre_hook(unit, index), prepend=True, with_kwargs=True)
        # In a list, members that raise must not be waited for.
        module.register_forward_hook(_post_hook(unit, index), prepend=False, always_call=is_list)
    for group in unit.groups:
        params = group.tensors.params  # type: ignore[attr-defined]
        for param in params:
            param.owner = group
        for module in dict.fromkeys(module for param in params for module, _ in param.places):
            module.register_state_dict_pre_hook(_reshard_hook(group))
            module.register_load_state_dict_pre_hook(_reshard_hook(group))
    for module in unit.modules:
        for _, parameter in _named_places(module):
            gradients.make_gradient_own(parameter, memory_of(unit.device))


def _pre_hook(unit: Unit, index: int) -> Callable[[nn.Cell, Args, Kwargs], tuple[Args, Kwargs]]:
    def pre_forward_hook(module: nn.Cell, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return before_forward(unit, index, args, kwargs)

    return pre_forward_hook


def _post_hook(unit: Unit, index: int) -> Callable[[nn.Cell, Any, Any], Any]:
    def post_forward_hook(module: nn.Cell, args: Any, output: Any) -> Any:
        return after_forward(unit, index, output)

    return post_forward_hook


def _reshard_hook(group: ParamGroup) -> Callable[..., None]:
    def reshard_hook(*args: Any, **kwargs: Any) -> None:
        group.to_sharded()

    return reshard_hook


# Forward


def before_forward(unit: Unit, index: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    autograd.resume_recording()
    entry = unit.pre_forward(index)
    if entry is ForwardEntry.ROOT:
        autograd.forget_shapes()
    policy = unit.mp_policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        dtype = policy.param_dtype
        args, kwargs = _map_inputs(lambda tensor: cast_floating(tensor, dtype), args, kwargs)
    if entry in (ForwardEntry.FIRST, ForwardEntry.ROOT) and autograd.is_recording():
        for group in unit.groups:
            args, kwargs = _attach_post_backward(group, args, kwargs)
    return args, kwargs


def after_forward(unit: Unit, index: int, output: Any) -> Any:
    is_root = unit.iteration.forward_root is unit
    records = autograd.is_recording()
    completed = unit.post_forward(index, in_backward=autograd.in_backward(), records=records)
    if is_root and completed:
        autograd.forget_shapes()
    with_hooks = bool(completed) and records
    for done in completed:
        if with_hooks:
            _attach_pre_backward(done, output)
        if done is not unit:
            output = _cast_output(done, output)
    return _cast_output(unit, output)


def _cast_output(unit: Unit, output: Any) -> Any:
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else map_tensors(lambda tensor: cast_floating(tensor, dtype), output)


def _map_inputs(fn: Callable[[Tensor], Tensor], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    # Item by item: args stays a plain tuple even if an item is a tuple subclass.
    return tuple(map_tensors(fn, arg) for arg in args), {key: map_tensors(fn, value) for key, value in kwargs.items()}


def _attach_post_backward(group: ParamGroup, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    inputs = tensors_with_grad((args, kwargs))
    if not inputs:
        return args, kwargs
    outputs = iter(autograd.watch(inputs, group.post_backward))
    return _map_inputs(lambda tensor: next(outputs) if autograd.requires_grad(tensor) else tensor, args, kwargs)


def _attach_pre_backward(unit: Unit, output: Any) -> None:
    tensors = tensors_with_grad(output)
    if not isinstance(output, Tensor):
        check_hidden_tensors(unit, owner=hidden_tensor_owner(output), beside_shown=bool(tensors))
    for tensor in tensors:
        tensor.register_hook(lambda grad: unit.pre_backward())


# Cell methods


class MindSporeModuleMixin:
    """What a wrapped ``nn.Cell`` does differently; stands between ``HSDPModule`` and the original class."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unit = unit_of(self)
        if unit is None:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.to_sharded()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.tensors.rebind()  # type: ignore[attr-defined]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters at and below this cell, those that still wait for their reduction and
        ``main_grad`` included. Cells have no such method of their own.
        """
        for _, parameter in _named_places(self):
            parameter._grad = None
            if param_of(parameter) is not None:
                parameter.grad = None
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad = None
        for unit in _units_below(self):
            for group in unit.groups:
                group.tensors.drop_gradients()

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """As ``nn.Cell.load_state_dict``; a value for a sharded parameter has the global shape (every rank passes the
        whole tensor) or this rank's local shape.

        Raises:
            StateDictError: it has neither shape.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, names and values, but got {state_dict!r}")
        units = _units_below(self)
        for unit in units:
            for group in unit.groups:
                group.to_sharded()
        loaded = dict(state_dict)
        for name, parameter in _named_places(self):
            if name in loaded and isinstance(loaded[name], Tensor):
                loaded[name] = _to_shard(name, loaded[name], parameter)
        result = super().load_state_dict(loaded, strict=strict)  # type: ignore[misc]
        for unit in units:
            for group in unit.groups:
                group.tensors.rebind()  # type: ignore[attr-defined]
        return result


def _units_below(module: Any) -> Iterable[Unit]:
    return dict.fromkeys(unit for _, cell in module.cells_and_names() if (unit := unit_of(cell)) is not None)


def _named_places(module: Any) -> Iterable[tuple[str, Any]]:
    for prefix, cell in module.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


def _to_shard(name: str, value: Tensor, parameter: Any) -> Tensor:
    param = param_of(parameter)
    if param is None or tuple(value.shape) == param.shard_shape:
        return value
    if tuple(value.shape) != param.layout.shape:
        raise StateDictError(
            f"expected the value of {name!r} to have the global shape {param.layout.shape} or the local shape "
            f"{param.shard_shape}, but got {tuple(value.shape)}"
        )
    with mindspore._no_grad():
        return param.memory.copy_of(
            param.memory.tensor(param.cut(param.memory.read(value)).reshape(-1), param.shard_shape)
        )
