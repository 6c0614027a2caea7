"""Running one case in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpcompat_conformance import context as worker_context
from hpcompat_conformance import dump as dumping
from hpcompat_conformance.checks import CheckFailed
from hpcompat_conformance.impl import Implementation
from hpcompat_conformance.reference import Reference
from hpcompat_conformance.run_context import Context


class CaseNotRun(Exception):
    """The case or the implementation could not be loaded: nothing is known about the clause."""


@dataclass(frozen=True)
class Passed:
    """The case held on this rank."""


@dataclass(frozen=True)
class Skipped:
    """The implementation does not claim ``capability``."""

    capability: str


def versions(*, load: Reference) -> Mapping[str, str]:
    """The versions that the implementation reports."""
    return dict(_implementation(load).versions)


def execute(
    *, case: Reference, requires: tuple[str, ...], load: Reference, seed: int, dump: Path | None = None
) -> Passed | Skipped:
    """Run the case; whatever it raises is its failure. The values of a comparison that fails go to ``dump``."""
    implementation = _implementation(load)
    try:
        function = case.resolve()
    except Exception as error:
        raise CaseNotRun(f"expected to find case {case}, but got {error!r}") from error
    for capability in requires:
        if capability not in implementation.capabilities:
            return Skipped(capability)
    place = worker_context.current()
    try:
        function(Context(implementation, rank=place.rank, world_size=place.world_size, seed=seed))
    except CheckFailed as error:
        if dump is not None:
            dumping.write(error, folder=dump, rank=place.rank)
        raise
    return Passed()


@cache
def _implementation(load: Reference) -> Implementation:
    try:
        implementation = load.resolve()()
    except Exception as error:
        raise CaseNotRun(f"expected {load} to load an implementation, but got {error!r}") from error
    assert isinstance(implementation, Implementation)
    return implementation
