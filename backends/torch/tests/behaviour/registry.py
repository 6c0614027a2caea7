"""How a function becomes a test: on which numbers of ranks it runs, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from hpcompat_conformance.pool import PoolSet

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Behaviour:
    """One run of one function; ``reports`` are the public reports that it guards against."""

    function: Callable[..., None]
    world_size: int
    reports: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        module = self.function.__module__.rpartition(".")[2]
        arguments = [f"{name}={_short(value)}" for name, value in self.arguments.items()]
        return "-".join([f"{module}.{self.function.__name__}", *arguments, str(self.world_size)])


def run(behaviour: Behaviour, pool: PoolSet) -> None:
    """On one rank in this process, on several in the pool."""
    if behaviour.world_size == 1:
        behaviour.function(**behaviour.arguments)
    else:
        pool(behaviour.world_size).run(behaviour.function, **behaviour.arguments)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def behaviour(
    *world_sizes: int, reports: Sequence[str] = (), each: Sequence[dict[str, Any]] = ({},)
) -> Callable[[Function], Function]:
    """Run the function on each of these numbers of ranks (1 and 2 by default), with each of these sets of arguments."""

    def mark(function: Function) -> Function:
        function.__behaviours__ = [  # type: ignore[attr-defined]
            Behaviour(function, world_size, tuple(reports), dict(arguments))
            for arguments in each
            for world_size in world_sizes or (1, 2)
        ]
        return function

    return mark


def behaviours_of(*modules: ModuleType) -> list[Behaviour]:
    """Those that the modules define, in the order of their definition."""
    return [
        found
        for module in modules
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
        for found in getattr(value, "__behaviours__", ())
    ]
