"""Planting a bug, and taking it back.

[Note: mutants that rot] A mutant reaches into the implementation, which changes. So nothing is replaced that is not
there (`StaleMutant`); it counts how often what stands in was called, as a bug that nobody met cannot have been found;
and an error of the mutant's own code is told from a case that found the bug.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcompat_conformance.reference import Reference, refer

PACKAGE = "hpcompat_conformance.mutants.bugs"
FOLDER = Path(__file__).parent / "bugs"


class StaleMutant(Exception):
    """The mutant does not fit the implementation any more; nothing is known about the suite."""


class Plant:
    """What a mutant is given to change the implementation with. A target is written ``"module:Class.method"``, where
    it is looked up (an imported name in the module that imported it)."""

    def __init__(self, *, file: str) -> None:
        self.num_calls = 0
        self.broken: str | None = None
        self._file = file
        self._undo = ExitStack()

    def around(self, target: str, stand_in: Callable[..., Any]) -> None:
        """Call ``stand_in(original, *args, **kwargs)`` in place of ``original(*args, **kwargs)``."""
        owner, name, original = _find(target)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            try:
                return stand_in(original, *args, **kwargs)
            except Exception as error:
                if _innermost_file(error.__traceback__) == self._file:
                    self.broken = f"{target}: {error!r}"
                raise

        own = vars(owner).get(name)
        self._undo.callback(delattr, owner, name) if own is None else self._undo.callback(setattr, owner, name, own)
        setattr(owner, name, replacement)

    def after(self, target: str, effect: Callable[..., None]) -> None:
        """Call ``effect(*args, **kwargs)`` after the target, which returns what it returns."""

        def stand_in(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            effect(*args, **kwargs)
            return result

        self.around(target, stand_in)

    def before(self, target: str, effect: Callable[..., None]) -> None:
        """Call ``effect(*args, **kwargs)`` before the target."""

        def stand_in(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            effect(*args, **kwargs)
            return original(*args, **kwargs)

        self.around(target, stand_in)

    def instead(self, target: str, result: Any = None) -> None:
        """Do nothing in place of the target, and return ``result``."""
        self.around(target, lambda original, *args, **kwargs: result)

    def take_back(self) -> None:
        """Everything is as it was."""
        self._undo.close()


@dataclass(frozen=True)
class Mutant:
    """``breaks`` is what a user would notice; ``likely`` are clauses, or ids of cases, that probably find it."""

    name: str
    breaks: str
    likely: tuple[str, ...]
    apply: Callable[[Plant], None]

    @property
    def reference(self) -> Reference:
        """For a worker to find it by."""
        return refer(self.apply)


def mutant(*likely: str) -> Callable[[Callable[[Plant], None]], Mutant]:
    """Mark a function that plants a bug; its docstring, one line, says what it breaks."""

    def mark(function: Callable[[Plant], None]) -> Mutant:
        name = function.__name__.replace("_", "-")
        return Mutant(name, (function.__doc__ or "").strip().rstrip("."), likely, function)

    return mark


@functools.cache
def all_mutants() -> Sequence[Mutant]:
    """Module by module in the order of their definition."""
    names = sorted(info.name for info in pkgutil.iter_modules([str(FOLDER)], f"{PACKAGE}."))
    modules = [importlib.import_module(name) for name in names]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Mutant)]
    if len({one.name for one in found}) < len(found):
        raise ValueError(f"expected each mutant once, but got {sorted(one.name for one in found)}")
    return tuple(found)


@contextmanager
def planted(one: Mutant) -> Iterator[Plant]:
    """The bug is there inside the block. StaleMutant if it cannot be planted."""
    plant = Plant(file=inspect.getfile(one.apply))
    try:
        try:
            one.apply(plant)
        except StaleMutant as error:
            raise StaleMutant(f"{one.name}: {error}") from None
        except Exception as error:
            raise StaleMutant(f"{one.name}: expected to plant it, but got {error!r}") from error
        yield plant
    finally:
        plant.take_back()


def _find(target: str) -> tuple[Any, str, Callable[..., Any]]:
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise StaleMutant(f"expected to find {target}, but got {error!r}") from error
    if not callable(original):
        raise StaleMutant(f"expected {target} to be a function, but got {original!r}")
    return owner, name, original


def _innermost_file(trace: TracebackType | None) -> str:
    """Where an exception comes from: of a mutant, its own code, not what it called."""
    file = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    return file
