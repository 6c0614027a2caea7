"""Running one case in a worker with a mutant planted there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcompat_conformance import execute
from hpcompat_conformance.mutants.plant import Mutant, Plant, StaleMutant, planted
from hpcompat_conformance.reference import Reference


class NotReached(Exception):
    """The case failed before it met the bug."""


@dataclass(frozen=True)
class Survived:
    """The case passed, or was skipped, although what stands in was called ``num_calls`` times on this rank."""

    num_calls: int


def execute_mutated(*, mutant: Reference, **arguments: Any) -> Survived:
    """`execute.execute` with a mutant. Raises what the case raises; NotReached if the bug had no part in it,
    StaleMutant if the mutant itself is at fault."""
    one: Any = mutant.resolve()
    with planted(one) as plant:
        try:
            execute.execute(**arguments)
        except execute.CaseNotRun:
            raise
        except Exception as error:
            _check(plant, one)
            if not plant.num_calls:
                raise NotReached(f"expected {one.name} to make the case fail, but it failed without it") from error
            raise
        _check(plant, one)
        return Survived(plant.num_calls)


def _check(plant: Plant, mutant: Mutant) -> None:
    if plant.broken is not None:
        raise StaleMutant(f"{mutant.name}: expected it to run, but its own code fails in {plant.broken}")
