"""Tensors inside nested inputs and outputs: dict, list, tuple, namedtuple, dataclass. A backend says what a tensor is.

[Note: the caller's containers]
Layers fill a dict or a list that the caller passes through all of them: a cache, losses on the side. So the layer gets
the caller's own object. Where a tensor inside has to be another one during forward (cast, moved, with a node of
autograd), it is put into that same object and the caller's is put back after forward, in the place where it then is;
what the layer added or changed stays. Tuples and frozen dataclasses cannot be filled, so they are made anew. After a
forward that raised, the caller's tensors are put back when the unit is entered again.
"""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TensorFn = Callable[[Any], Any]

_MAX_DEPTH = 100
_MAX_OBJECTS = 10_000
_ATOMS: tuple[type, ...] = (int, float, complex, bool, str, bytes, type(None), type)


class Lent(NamedTuple):
    """A tensor of the caller's for which another one stands in. [Note: the caller's containers]"""

    container: Any
    key: Any
    original: Any
    stand_in: Any


class TensorTree:
    """Walks nested values.

    Args:
        tensor_type: what a tensor is an instance of.
        requires_grad: whether backward would reach a tensor.
        atoms: types of the framework that hold no tensors, such as its dtypes.
        opaque: types that are never looked into, such as its modules.
        packed: for types of the framework that hold one tensor, how to get it, and how to make one with another.
    """

    def __init__(
        self,
        tensor_type: type,
        *,
        requires_grad: Callable[[Any], bool],
        atoms: tuple[type, ...] = (),
        opaque: tuple[type, ...] = (),
        packed: Mapping[type, tuple[TensorFn, Callable[[Any, Any], Any]]] | None = None,
    ) -> None:
        self.tensor_type = tensor_type
        self._requires_grad = requires_grad
        self._atoms = (*_ATOMS, *atoms)
        self._opaque = opaque
        self._packed = dict(packed or {})

    def map(self, fn: TensorFn, value: Any) -> Any:
        """``value`` with ``fn`` applied to every tensor; containers in which nothing changes are returned as they are.

        Raises:
            ValueError: the containers are nested deeper than any real model output, so one probably holds itself.
        """
        return self._map(fn, value, 0, None)

    def lend(self, fn: TensorFn, args: tuple[Any, ...], kwargs: dict[str, Any], lent: list[Lent]) -> Any:
        """``args`` and ``kwargs`` with ``fn`` applied to every tensor, in the caller's own containers.

        What :meth:`give_back` is to undo is added to ``lent``.
        """
        # Item by item: args stays a plain tuple even if an item is a tuple subclass.
        return (
            tuple(self._map(fn, arg, 0, lent) for arg in args),
            {key: self._map(fn, value, 0, lent) for key, value in kwargs.items()},
        )

    def with_grad(self, value: Any) -> list[Any]:
        """The tensors in ``value`` that require grad, in traversal order."""
        if isinstance(value, self.tensor_type):
            return [value] if self._requires_grad(value) else []
        found: list[Any] = []

        def collect(tensor: Any) -> Any:
            if self._requires_grad(tensor):
                found.append(tensor)
            return tensor

        self.map(collect, value)
        return found

    def _map(self, fn: TensorFn, value: Any, depth: int, lent: list[Lent] | None) -> Any:
        if isinstance(value, self.tensor_type):
            return fn(value)
        if isinstance(value, self._atoms):
            return value
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"expected a finitely nested input or output, but got {type(value).__name__} over {_MAX_DEPTH} levels "
                "deep"
            )
        items = self._items(value)
        if items is None:
            return value
        changes = {}
        for key, old in items:
            new = self._map(fn, old, depth + 1, lent)
            if new is not old:
                changes[key] = new
        if not changes:
            return value
        if lent is None or not _is_mutable(value):
            return self._rebuild(value, changes)
        for key, new in changes.items():
            lent.append(Lent(value, key, _get(value, key), new))
            _set(value, key, new)
        return value

    def _items(self, value: Any) -> list[tuple[Any, Any]] | None:
        """What a container holds, by key; ``None`` for what is none."""
        if isinstance(value, dict):
            return list(value.items())
        if type(value) in self._packed:
            return [(None, self._packed[type(value)][0](value))]
        if isinstance(value, list | tuple):
            return list(enumerate(value))
        if dataclasses.is_dataclass(value):
            return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return None

    def _rebuild(self, value: Any, changes: dict[Any, Any]) -> Any:
        if isinstance(value, dict):
            return _rebuild_dict(value, changes)
        if type(value) in self._packed:
            return self._packed[type(value)][1](value, changes[None])
        if isinstance(value, list | tuple):
            items = [changes.get(index, item) for index, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        try:
            return dataclasses.replace(value, **changes)
        except TypeError as error:
            raise TypeError(
                f"Failed to reconstruct dataclass {type(value).__name__} via dataclasses.replace(). Expected "
                f"dataclasses that go in or out of a wrapped module to allow that, but got {error}"
            ) from error

    # Tensors out of sight

    def hidden_owner(self, value: Any) -> str | None:
        """The type name of an object in ``value`` that holds tensors requiring grad where :meth:`map` does not look."""
        return self._find_hidden(value, owner=None, seen=set())

    def _find_hidden(self, value: Any, *, owner: str | None, seen: set[int]) -> str | None:
        if isinstance(value, self.tensor_type):
            return owner if self._requires_grad(value) else None
        # Objects may refer to one another in circles; all of them are alive while we look, so id() tells them apart.
        if isinstance(value, (*self._atoms, *self._opaque)) or id(value) in seen or len(seen) > _MAX_OBJECTS:
            return None
        seen.add(id(value))
        items = self._items(value)
        if items is not None:
            children = [child for _, child in items]
        else:
            children = _out_of_sight(value)
            owner = type(value).__name__ if owner is None else owner
        return next((found for child in children if (found := self._find_hidden(child, owner=owner, seen=seen))), None)


def give_back(lent: list[Lent]) -> None:
    """Put the caller's tensors back, the latest first. [Note: the caller's containers]"""
    while lent:
        container, key, original, stand_in = lent.pop()
        if _get(container, key) is stand_in:
            _set(container, key, original)
        elif isinstance(container, list):  # the layer may have moved it
            for index, item in enumerate(container):
                if item is stand_in:
                    container[index] = original
                    break


def _is_mutable(value: Any) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        params: Any = getattr(type(value), "__dataclass_params__")  # noqa: B009
        return not params.frozen
    return isinstance(value, dict | list)


def _get(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return container.get(key)
    if isinstance(container, list):
        return container[key] if key < len(container) else None
    return getattr(container, key, None)


def _set(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list):
        container[key] = value
    else:
        setattr(container, key, value)


def _rebuild_dict(original: Any, changes: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return {**original, **changes}
    if hasattr(original, "__dataclass_fields__"):  # such as a ModelOutput: an ordered dict with fields
        return type(original)(**{**original, **changes})
    rebuilt = original.copy()
    rebuilt.update(changes)
    return rebuilt


def _out_of_sight(value: Any) -> list[Any]:
    if isinstance(value, set | frozenset | deque):
        return list(value)
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
    if isinstance(value, types.GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame else []
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *held]
