"""Naming a function in one process so that another can find it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Reference:
    """A module-level function. ``file`` finds its module when the name alone does not, as for a test module that
    pytest imported by path."""

    module: str
    name: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def resolve(self) -> Callable[..., Any]:
        """The function. ImportError or AttributeError if it is not there."""
        value: Any = self._import()
        for part in self.name.split("."):
            value = getattr(value, part)
        return value  # type: ignore[no-any-return]

    def _import(self) -> ModuleType:
        if self.module in sys.modules:
            return sys.modules[self.module]
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Only "there is no such module": a module that is there and misses another one must say so.
            missing = error.name or ""
            if self.file is None or not (self.module == missing or self.module.startswith(missing + ".")):
                raise
            module = _load(self.module, file=self.file)
        return module


def refer(target: str | Callable[..., Any]) -> Reference:
    """``"module:function"`` or a module-level function, as a Reference. ValueError for what cannot be named."""
    if isinstance(target, str):
        module, separator, name = target.partition(":")
        if not (separator and module and name):
            raise ValueError(f"expected a target written 'module:function', but got {target!r}")
        return Reference(module, name)
    name = getattr(target, "__qualname__", "<unnamed>")
    if "<" in name:
        raise ValueError(f"expected a module-level function, but got {target!r}: a worker cannot find it by name")
    if target.__module__ == "__main__":
        raise ValueError(f"expected a function of an importable module, but got {target!r} of __main__")
    return Reference(target.__module__, name, inspect.getsourcefile(target))


def _load(name: str, *, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"expected a Python file for module {name}, but got {file!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
