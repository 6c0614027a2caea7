"""Tensors inside nested inputs and outputs: dict, list, tuple, namedtuple, dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

TensorFn = Callable[[torch.Tensor], torch.Tensor]

_MAX_DEPTH = 100
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def map_tensors(fn: TensorFn, value: Any, _depth: int = 0) -> Any:
    """``value`` with ``fn`` applied to every tensor; containers in which nothing changes are returned as they are.

    Raises:
        ValueError: the containers are nested deeper than any real model output, so one probably holds itself.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, _ATOMS):
        return value
    if _depth > _MAX_DEPTH:
        raise ValueError(
            f"expected a finitely nested input or output, but got {type(value).__name__} over {_MAX_DEPTH} levels deep"
        )
    if isinstance(value, dict):
        mapped = {key: map_tensors(fn, item, _depth + 1) for key, item in value.items()}
        if all(mapped[key] is item for key, item in value.items()):
            return value
        return _rebuild_dict(value, mapped)
    if isinstance(value, PackedSequence):
        data = fn(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, list | tuple):
        items = [map_tensors(fn, item, _depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(fn, value, _depth)
    return value


def _rebuild_dict(original: dict[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return mapped
    if dataclasses.is_dataclass(original):  # such as a ModelOutput: an ordered dict with fields
        return type(original)(**mapped)
    rebuilt = original.copy()
    rebuilt.update(mapped)
    return rebuilt


def _map_dataclass(fn: TensorFn, value: Any, depth: int) -> Any:
    changes = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_tensors(fn, old, depth + 1)
        if new is not old:
            changes[field.name] = new
    if not changes:
        return value
    try:
        return dataclasses.replace(value, **changes)
    except TypeError as error:
        raise TypeError(
            f"expected {type(value).__name__} to be rebuilt by dataclasses.replace, but got {error}; dataclasses that "
            "go in or out of a wrapped module must allow that"
        ) from error


def tensors_with_grad(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` that require grad, in traversal order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def hidden_tensor_owner(value: Any, _depth: int = 0) -> str | None:
    """The type name of an object in ``value`` that holds tensors requiring grad where ``map_tensors`` does not look."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, *_ATOMS)) or _depth > 4:
        return None
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        children = list(value)
        if isinstance(value, set | frozenset) and any(
            isinstance(c, torch.Tensor) and c.requires_grad for c in children
        ):
            return type(value).__name__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        attributes = [*getattr(value, "__dict__", {}).values(), *_slots(value)]
        if any(tensors_with_grad(attribute) for attribute in attributes):
            return type(value).__name__
        children = attributes
    return next((owner for child in children if (owner := hidden_tensor_owner(child, _depth + 1))), None)


def _slots(value: Any) -> list[Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return [getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)]
