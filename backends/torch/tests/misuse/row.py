"""One row of the table, and how it is provoked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh

Provoke = Callable[[Any], object]


@dataclass(frozen=True)
class Misuse:
    """A mistake and its error.

    ``provoke`` makes the mistake with the names of an API: hpcompat, or ``torch.distributed.fsdp`` where ``native`` is
    set. The error must be an instance of each of ``types``. ``message`` is a regular expression for what the error
    names (the parameter, axis or argument) and what came; ``advice`` one for what to do about it. ``clause`` is the
    clause of the spec that asks for the error, empty where none speaks of the mistake. ``native`` is the class that
    native FSDP2 raises for the same calls; it must be one of ``types``, so that code which catches native's error
    catches ours.
    """

    id: str
    provoke: Provoke
    types: tuple[type[Exception], ...]
    message: str
    advice: str
    clause: str = ""
    native: type[Exception] | None = None
    world_size: int = 1


@dataclass(frozen=True)
class Raised:
    """An error as it left the API; survives the way between processes."""

    bases: tuple[str, ...]
    message: str

    def is_a(self, kind: type[Exception]) -> bool:
        return qualified(kind) in self.bases


class OnTheCpu:
    """An API whose default mesh is all ranks on the CPU, also where there is an accelerator."""

    def __init__(self, name: str) -> None:
        self._api = importlib.import_module(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def fully_shard(self, module: Any, *, mesh: Any = None, **options: Any) -> Any:
        """As the API's own."""
        return self._api.fully_shard(module, mesh=_mesh(mesh), **options)

    def replicate(self, module: Any, *, mesh: Any = None, **options: Any) -> Any:
        """As the API's own; native has it in another module."""
        function = getattr(self._api, "replicate", None) or replicate_with_fsdp.replicate
        return function(module, mesh=_mesh(mesh), **options)


def _mesh(mesh: Any) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def attempt(provoke: Provoke, *, api: str) -> Raised | None:
    """What ``provoke`` raises with the API of that module name; ``None`` if nothing."""
    try:
        provoke(OnTheCpu(api))
    except Exception as error:
        return Raised(tuple(qualified(base) for base in type(error).__mro__), str(error))
    return None
