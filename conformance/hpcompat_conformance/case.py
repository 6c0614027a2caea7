"""Cases: functions of a `Context`, each checking one clause."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from hpcompat_conformance import spec
from hpcompat_conformance.reference import Reference, refer
from hpcompat_conformance.run_context import Context

CaseFunction = Callable[[Context], None]
DEFAULT_PACKAGE = "hpcompat_conformance.cases"


@dataclass(frozen=True)
class Case:
    """``id`` is the module's last name and the function's, ``requires`` the capabilities without which it is skipped,
    ``reports`` the public reports (ids of `public_reports`) that it guards against."""

    id: str
    clause: str
    procs: tuple[int, ...]
    requires: tuple[str, ...]
    reports: tuple[str, ...]
    reference: Reference


def case(
    clause: str, *, procs: Sequence[int], requires: Sequence[str] = (), reports: Sequence[str] = ()
) -> Callable[[CaseFunction], CaseFunction]:
    """Mark a module-level function as a case of the clause, to be run on each of these numbers of processes.

    It raises to fail; `checks` has what it needs. It must not ask which implementation it runs on.
    """
    if clause not in spec.clauses():
        raise ValueError(f"expected a clause of spec {spec.VERSION}, but got {clause!r}")

    def mark(function: CaseFunction) -> CaseFunction:
        reference = refer(function)
        identity = f"{reference.module.rpartition('.')[2]}.{reference.name}"
        function.__case__ = Case(  # type: ignore[attr-defined]
            identity, clause, tuple(procs), tuple(requires), tuple(reports), reference
        )
        return function

    return mark


def cases_of(module: ModuleType) -> list[Case]:
    """The cases that a module defines, in the order of their definition; of a package, those of its modules."""
    if hasattr(module, "__path__"):
        names = sorted(info.name for info in pkgutil.iter_modules(module.__path__, f"{module.__name__}."))
        return [found for name in names for found in cases_of(importlib.import_module(name))]
    marked = (getattr(value, "__case__", None) for value in vars(module).values())
    return [found for found in marked if isinstance(found, Case) and found.reference.module == module.__name__]


def all_cases() -> list[Case]:
    """The suite's own cases."""
    return cases_of(importlib.import_module(DEFAULT_PACKAGE))
