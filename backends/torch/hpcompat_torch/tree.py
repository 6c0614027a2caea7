"""Tensors inside nested inputs and outputs: dict, list, tuple, namedtuple, dataclass."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

TensorFn = Callable[[torch.Tensor], torch.Tensor]

_MAX_DEPTH = 100
_MAX_OBJECTS = 10_000
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
            f"Failed to reconstruct dataclass {type(value).__name__} via dataclasses.replace(). Expected dataclasses "
            f"that go in or out of a wrapped module to allow that, but got {error}"
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


def hidden_tensor_owner(value: Any) -> str | None:
    """The type name of an object in ``value`` that holds tensors requiring grad where ``map_tensors`` does not look."""
    return _find_hidden(value, owner=None, seen=set())


def _find_hidden(value: Any, *, owner: str | None, seen: set[int]) -> str | None:
    if isinstance(value, torch.Tensor):
        return owner if value.requires_grad else None
    # Objects may refer to one another in circles; all of them are alive while we look, so id() tells them apart.
    if isinstance(value, (torch.nn.Module, type, *_ATOMS)) or id(value) in seen or len(seen) > _MAX_OBJECTS:
        return None
    seen.add(id(value))
    children, is_visible = _contents(value)
    if owner is None and not is_visible:
        owner = type(value).__name__
    return next((found for child in children if (found := _find_hidden(child, owner=owner, seen=seen))), None)


def _contents(value: Any) -> tuple[list[Any], bool]:
    """What ``value`` holds, and whether ``map_tensors`` sees it."""
    if isinstance(value, dict):
        return list(value.values()), True
    if isinstance(value, list | tuple):
        return list(value), True
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)], True
    if isinstance(value, set | frozenset | deque):
        return list(value), False
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()], False
    if isinstance(value, types.GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame else [], False
    return [*getattr(value, "__dict__", {}).values(), *_slots(value)], False


def _slots(value: Any) -> list[Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return [getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)]
