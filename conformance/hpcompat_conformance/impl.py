"""Implementations under test, and how to find them.

A third party adds its own with an entry point in the group ``hpcompat.conformance`` that names an `Adapter`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from hpcompat_conformance.framework import Framework
from hpcompat_conformance.launcher import SUBPROCESSES, Launcher
from hpcompat_conformance.pool import Target
from hpcompat_conformance.reference import refer

ENTRY_POINT_GROUP = "hpcompat.conformance"
BUILT_IN = {
    "hpcompat-mindspore": "hpcompat_conformance.adapters.hpcompat_mindspore:ADAPTER",
    "hpcompat-torch": "hpcompat_conformance.adapters.hpcompat_torch:ADAPTER",
    "hyper-parallel-mindspore": "hpcompat_conformance.adapters.hyper_parallel_mindspore:ADAPTER",
    "hyper-parallel-torch": "hpcompat_conformance.adapters.hyper_parallel_torch:ADAPTER",
    "torch-fsdp2": "hpcompat_conformance.adapters.torch_fsdp2:ADAPTER",
}


class Api(Protocol):
    """The names that cases call; those of FSDP2. Usually the package itself."""

    fully_shard: Any
    FSDPModule: Any
    MixedPrecisionPolicy: Any


@dataclass(frozen=True)
class Implementation:
    """What a case gets. ``api`` is called, ``framework`` makes its arguments and looks at its results.

    ``capabilities`` are what a case may require: ``Name`` for a public name of the API, ``Class.method`` for a method,
    ``fully_shard.argument`` for an argument, and whatever words the adapter adds.
    """

    api: Api
    framework: Framework
    capabilities: frozenset[str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Adapter:
    """``modules`` must be importable; ``launcher`` starts worker processes, ``worker_setup`` prepares one (see
    `pool.WorkerPool`) and ``load`` is called in it and returns an `Implementation`; the latter two are module-level
    functions or their names. Importing the adapter's own module must not import a framework."""

    name: str
    modules: tuple[str, ...]
    worker_setup: Target
    load: Target
    launcher: Launcher = SUBPROCESSES

    def missing(self) -> list[str]:
        """The modules that are not installed, and what the launcher lacks."""
        return [name for name in self.modules if importlib.util.find_spec(name) is None] + self.launcher.missing()


def adapter_names() -> list[str]:
    """All implementations that can be named, installed or not."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def adapter_named(name: str) -> Adapter:
    """The adapter with that name. ValueError if there is none."""
    if name in BUILT_IN:
        adapter: Any = refer(BUILT_IN[name]).resolve()
    else:
        points = entry_points(group=ENTRY_POINT_GROUP, name=name)
        if not points:
            raise ValueError(f"expected an implementation out of {', '.join(adapter_names())}, but got {name!r}")
        adapter = next(iter(points)).load()
    if not isinstance(adapter, Adapter):
        raise TypeError(f"expected entry point {name!r} to name an Adapter, but got {adapter!r}")
    return adapter


def api_capabilities(api: Any, *, classes: tuple[str, ...] = ("FSDPModule", "MixedPrecisionPolicy")) -> frozenset[str]:
    """The public names of an API, the public methods and defaults of those classes in it that it has, and the arguments
    of its ``fully_shard``."""
    names = {name for name in dir(api) if not name.startswith("_")}
    methods = {
        f"{owner}.{method}"
        for owner in classes
        if owner in names
        for method in dir(getattr(api, owner))
        if not method.startswith("_")
    }
    arguments = {f"fully_shard.{argument}" for argument in inspect.signature(api.fully_shard).parameters}
    return frozenset(names | methods | arguments)
