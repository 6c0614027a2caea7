"""Values that are loaded: which shapes they may have, and this rank's part of them, without communication.

A tensor does not say whether it is a shard. A sharded parameter does, which is what a state dict holds, and so does
what this file makes: it bears the same mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, nn

from hpcompat.core.unit import unit_of
from hpcompat.errors import StateDictError
from hpcompat_mindspore.param import ShardedParam, mark, param_of, shard_of

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedUnit

Misfits = dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]]


def units_below(module: nn.Cell) -> Iterable[HookedUnit]:
    """The units at and below ``module``."""
    return dict.fromkeys(unit for _, cell in module.cells_and_names() if (unit := unit_of(cell)) is not None)


def named_places(module: nn.Cell) -> Iterable[tuple[str, Parameter]]:
    """Every place of every parameter, shared ones included."""
    for prefix, cell in module.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter


def reshard_below(module: nn.Cell) -> None:
    """Every unit at and below ``module`` shows its shards."""
    for unit in units_below(module):
        for group in unit.groups:
            group.to_sharded_for_loading()


def rebind_below(module: nn.Cell) -> None:
    """Take up what was loaded."""
    for unit in units_below(module):
        for group in unit.groups:
            group.tensors.rebind()  # type: ignore[attr-defined]


def shards_of(module: nn.Cell, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """``state_dict`` with this rank's shards in place of tensors of the global shape.

    Raises:
        StateDictError: a value has another shape than the whole parameter, and is no shard that says so.
    """
    loaded: dict[str, Any] = dict(state_dict)
    misfits: Misfits = {}
    for name, parameter in named_places(module):
        _replace(loaded, misfits, name, parameter)
    if misfits:
        raise StateDictError.of_shapes(type(module).__name__, misfits)
    return loaded


def load_local_state_dict(module: nn.Cell, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    reshard_below(module)
    loaded: dict[str, Any] = dict(state_dict)
    misfits: Misfits = {}
    for name, parameter in named_places(module):
        value, param = loaded.get(name), param_of(parameter)
        if param is None or not isinstance(value, Tensor) or is_shard_of(value, param):
            continue
        if tuple(value.shape) == param.shard_shape:
            loaded[name] = mark(param.memory.copy_of(value), param)
        else:
            misfits[name] = (param.shard_shape, tuple(value.shape), False)
    if misfits:
        raise StateDictError.of_shapes(type(module).__name__, misfits, are_local=True)
    result = module.load_state_dict(loaded, strict=strict)
    rebind_below(module)
    return result


def refuse_in(cell: nn.Cell, state_dict: MutableMapping[str, Any], prefix: str, messages: list[str]) -> None:
    """The same for one cell of a model that is no unit itself, whose own ``load_state_dict`` runs."""
    misfits: Misfits = {}
    for name, parameter in cell._params.items():
        if parameter is not None:
            _replace(state_dict, misfits, prefix + name, parameter)
    for name in misfits:
        del state_dict[name]
    messages.extend(StateDictError.lines(misfits))


def _replace(loaded: MutableMapping[str, Any], misfits: Misfits, name: str, parameter: Parameter) -> None:
    value, param = loaded.get(name), param_of(parameter)
    if param is None or not isinstance(value, Tensor) or is_shard_of(value, param):
        return
    shape = tuple(value.shape)
    if shape != param.layout.shape:
        misfits[name] = (param.layout.shape, shape, shape == param.shard_shape and shard_of(value) is None)
        return
    with mindspore._no_grad():
        shard = param.memory.tensor(param.cut(param.memory.read(value)).reshape(-1), param.shard_shape)
        loaded[name] = mark(param.memory.copy_of(shard), param)


def is_shard_of(value: Tensor, param: ShardedParam) -> bool:
    """Whether ``value`` says that it is this rank's shard of a parameter that is cut like ``param``."""
    other = shard_of(value)
    return (
        other is not None
        and tuple(value.shape) == param.shard_shape
        and (other.layout, other.rank) == (param.layout, param.rank)
    )
