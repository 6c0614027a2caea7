"""The conformance suite against an implementation, a test for each case on each number of processes.

    @pytest.mark.parametrize("run", conformance_runs())
    def test_the_suite(run: ConformanceRun, runners: Runners, tally: Tally) -> None:
        run.check("hpcompat-mindspore", runners=runners, tally=tally)

By default everything there is on one process, each case on several processes once, and each chapter of the spec on each
number of processes. ``python -m tox run -e conformance`` prints the whole table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from covering import design
from hpcompat_conformance import expected
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.impl import adapter_named
from hpcompat_conformance.pool import PoolSet
from hpcompat_conformance.pytest_cases import Runners, conclude
from hpcompat_conformance.runner import DEFAULT_PROCS, Plan

# How often each kind of result has come up.
Tally = Counter[str]
LEAST_PART_THAT_PASSES, WORTH_COUNTING = 0.7, 100


class ConformanceRun(NamedTuple):
    case: Case
    procs: int

    @property
    def id(self) -> str:
        return f"{self.procs}-{self.case.clause}-{self.case.id}"

    def check(self, implementation: str, *, runners: Runners, tally: Tally) -> None:
        """It ends as expected of the implementation."""
        result = runners.of(plan_of(implementation)).run(self.case, procs=self.procs)
        tally[result.result] += 1
        conclude(result)


def conformance_runs(*, all_by_default: bool = False) -> list[Any]:
    """Parameters of a test, fewest processes first."""
    product = [ConformanceRun(case, procs) for procs in DEFAULT_PROCS for case in all_cases() if procs in case.procs]
    several = [run for run in product if run.procs > 1]
    rows = [(run.case.id, (chapter(run.case.clause), run.procs)) for run in several]
    default = {several[index] for index in design(rows, strength=1)}
    return [
        pytest.param(
            run,
            id=run.id,
            marks=pytest.mark.thorough
            if all_by_default or run.procs == 1 or run in default
            else pytest.mark.exhaustive,
        )
        for run in product
    ]


def chapter(clause: str) -> str:
    """The letters of its id."""
    return clause.partition("-")[0]


@cache
def plan_of(implementation: str) -> Plan:
    path = expected.default_path(implementation)
    gaps = expected.load_gaps(path, known_cases=[case.id for case in all_cases()]) if path else []
    return Plan(adapter_named(implementation), all_cases(), gaps=gaps)


@pytest.fixture(scope="module")
def runners(pool: PoolSet) -> Runners:
    """In the processes that all tests share."""
    return Runners(pool)


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """Of all results of a module: that a suite which skips, or expects to fail, does not look like one that passes."""
    seen: Tally = Counter()
    yield seen
    assert seen.total() < WORTH_COUNTING or seen["pass"] > LEAST_PART_THAT_PASSES * seen.total(), seen
