"""How a function becomes a test: on which numbers of ranks it runs, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import pytest

from covering import covering
from hpcompat_conformance.pool import PoolSet

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Behaviour:
    """One run of one function; ``reports`` are the public reports that it guards against."""

    function: Callable[..., None]
    world_size: int
    reports: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    strength: int | None = None

    @property
    def id(self) -> str:
        module = self.function.__module__.rpartition(".")[2]
        return "-".join([f"{module}.{self.function.__name__}", *self.choices])

    @property
    def choices(self) -> tuple[str, ...]:
        return *(f"{name}={_short(value)}" for name, value in self.arguments.items()), str(self.world_size)


def run(behaviour: Behaviour, pool: PoolSet) -> None:
    """On one rank in this process, on several in the pool."""
    if behaviour.world_size == 1:
        behaviour.function(**behaviour.arguments)
    else:
        pool(behaviour.world_size).run(behaviour.function, **behaviour.arguments)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def behaviour(
    *world_sizes: int, reports: Sequence[str] = (), each: Sequence[dict[str, Any]] = ({},), strength: int | None = None
) -> Callable[[Function], Function]:
    """Run the function on each of these numbers of ranks (1 and 2 by default), with each of these sets of arguments.

    With a ``strength``, not all of them by default, see `covering`.
    """

    def mark(function: Function) -> Function:
        function.__behaviours__ = [  # type: ignore[attr-defined]
            Behaviour(function, world_size, tuple(reports), dict(arguments), strength)
            for arguments in each
            for world_size in world_sizes or (1, 2)
        ]
        return function

    return mark


def behaviours_of(*modules: ModuleType) -> list[Any]:
    """Those that the modules define, in the order of their definition, as parameters of a test."""
    found = [
        value.__behaviours__
        for module in modules
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__behaviours__")
    ]
    return [parameter for behaviours in found for parameter in _parameters(behaviours)]


def _parameters(behaviours: list[Behaviour]) -> list[Any]:
    strength = behaviours[0].strength
    if strength is None:
        return [pytest.param(one, id=one.id) for one in behaviours]
    return covering(behaviours, lambda one: one.choices, strength=strength, id=lambda one: one.id)
