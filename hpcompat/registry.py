"""Which backend does the work: found by entry point, chosen without importing a framework.

The order is: an explicit name, then the environment variable ``HPCOMPAT_BACKEND``, then the type of what the caller
passed. A backend's entry point bears the name of its framework's top-level module. An object of a framework can only
exist once that module is in ``sys.modules``, so detection looks there and never starts an import of its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "ENV_VAR",
    "available_backends",
    "backend_for",
    "canonical_name",
    "get_backend",
    "make_default",
]

ENTRY_POINT_GROUP = "hpcompat.backends"
ENV_VAR = "HPCOMPAT_BACKEND"
ALIASES = {"pytorch": "torch", "pt": "torch", "ms": "mindspore"}

_instances: dict[str, Backend] = {}
_default: str | None = None


def available_backends() -> dict[str, EntryPoint]:
    """Every declared backend by name, sorted; its framework may still be missing (see :func:`framework_installed`)."""
    return dict(_declared())


def get_backend(name: str | None = None) -> Backend:
    """Return the backend called ``name``, importing its framework if need be.

    Without a name: the one that ``init_process_group`` started, else ``HPCOMPAT_BACKEND``, else the one whose framework
    is already imported, else the one whose framework is installed.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: the name is unknown, or there is no name and not exactly one candidate.
        ImportError: the backend is known but its framework is not installed.
    """
    return _instance(chosen_name(_default if name is None else name) or _only_candidate())


def make_default(name: str | None) -> None:
    """From now on, ``name`` is what calls mean that neither name a backend nor pass an object of one."""
    global _default
    _default = name


def backend_for(module: object, *, backend: str | None = None) -> Backend:
    """Return the backend that handles ``module``, an object of one of the frameworks (a module, a mesh, a tensor).

    Raises:
        TypeError: ``backend`` is not a string, or ``module`` belongs to no installed backend, or not to the one that
            ``backend`` or ``HPCOMPAT_BACKEND`` names.
        ValueError: that name is unknown.
        ImportError: that backend's framework is not installed.
    """
    name = chosen_name(backend)
    if name is not None:
        chosen = _instance(name)
        if not chosen.owns(module):
            source = f"backend={backend!r}" if backend is not None else f"{ENV_VAR}={os.environ[ENV_VAR]!r}"
            raise TypeError(
                f"expected an object of {chosen.name}, as {source} asks, but got {_describe(module)}; "
                f"pass an object of {chosen.name} or drop {source}"
            )
        return chosen
    for candidate in _imported():
        instance = _instance(candidate)
        if instance.owns(module):
            return instance
    raise TypeError(
        f"expected an object of an installed backend's framework, but got {_describe(module)}; {_listing()}"
    )


def canonical_name(name: str) -> str:
    """``name`` without its alias: ``"pt"`` is ``"torch"``. Does not ask whether such a backend exists."""
    if not isinstance(name, str):
        raise TypeError(f"expected the backend's name as a string, but got {name!r}")
    lowered = name.strip().lower()
    return ALIASES.get(lowered, lowered)


def chosen_name(name: str | None) -> str | None:
    """The declared backend that ``name``, or else the environment, asks for; None if neither does."""
    requested, source = (name, "backend") if name is not None else (os.environ.get(ENV_VAR) or None, ENV_VAR)
    if requested is None:
        return None
    canonical = canonical_name(requested)
    if canonical not in _declared():
        raise ValueError(f"expected {source} to name an installed backend, but got {requested!r}; {_listing()}")
    return canonical


def framework_installed(name: str) -> bool:
    """Whether the framework of backend ``name`` is imported or can be found, without importing it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def installed_backends() -> list[str]:
    """The declared backends whose framework is installed, sorted."""
    return [name for name in _declared() if framework_installed(name)]


@functools.cache
def _declared() -> dict[str, EntryPoint]:
    # Cached: reading the metadata of every installed distribution takes milliseconds, and wrapping asks per module.
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: point for point in sorted(points, key=lambda point: point.name)}


def _imported() -> list[str]:
    return [name for name in _declared() if sys.modules.get(name) is not None]


def _only_candidate() -> str:
    candidates = _imported() or installed_backends()
    if len(candidates) != 1:
        raise ValueError(f"expected one backend to choose, but got {candidates!r}; {_listing()}")
    return candidates[0]


def _instance(name: str) -> Backend:
    if name not in _instances:
        if not framework_installed(name):
            raise ImportError(
                f"expected {name} to be installed for the {name!r} backend, but got no such package; "
                f"install it with: pip install 'hpcompat[{name}]'"
            )
        factory = _declared()[name].load()
        _instances[name] = cast("Backend", factory())
    return _instances[name]


def _describe(module: object) -> str:
    kind = type(module)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


def _listing() -> str:
    installed = installed_backends()
    missing = [name for name in _declared() if name not in installed]
    text = f"installed backends: {', '.join(installed) or 'none'}"
    if missing:
        text += f"; without their framework: {', '.join(missing)}"
    return f"{text}; choose one with backend= or {ENV_VAR}"
