"""The cases as tests of pytest, for those who want its selection and its reports:

    pytest --pyargs hpcompat_conformance -p hpcompat_conformance.pytest_cases --impl hpcompat-torch --procs 1,2

What fails as expected and what is waived is an xfail, and what needs a capability that is not there is skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from hpcompat_conformance import cli, planning
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.pool import PoolSet
from hpcompat_conformance.report import text_of
from hpcompat_conformance.results import BAD_KINDS, Result
from hpcompat_conformance.runner import CaseRunner, Plan

# Those of the command line that say what to run and what to expect.
OPTIONS = ("--impl", "--procs", "--spec", "--only", "--seed", "--timeout", "--xfails", "--waivers")
FIXTURE = "conformance_case"
PLANS: pytest.StashKey[list[Plan]] = pytest.StashKey()


class Runners:
    """The case runner of the current implementation; only one has processes at a time, unless it is given ``pools``."""

    def __init__(self, pools: PoolSet | None = None) -> None:
        self._pools = pools
        self._current: CaseRunner | None = None

    def of(self, plan: Plan) -> CaseRunner:
        if self._current is None or self._current.plan is not plan:
            self.close()
            self._current = CaseRunner(plan, pools=self._pools)
        return self._current

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, as for ``hpcompat conformance``."""
    group = parser.getgroup("conformance", "FSDP2 conformance, see hpcompat conformance --help")
    for option in OPTIONS:
        group.addoption(option, dest=f"conformance_{option.strip('-')}", metavar="VALUE")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options that make no sense before anything is collected."""
    try:
        config.stash[PLANS] = planning.plans(_arguments(config), known=all_cases())
    except (ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each implementation, number of processes and case, in this order."""
    if FIXTURE not in metafunc.fixturenames:
        return
    plans = metafunc.config.stash[PLANS]
    chosen = [(plan, n, case) for plan in plans for n in sorted(set(plan.procs)) for case in plan.cases_on(n)]
    names = [f"{plan.adapter.name}-{n}-{case.clause}-{case.id}" for plan, n, case in chosen]
    metafunc.parametrize(FIXTURE, chosen, ids=names)


@pytest.fixture(scope="session")
def conformance_runners() -> Iterator[Runners]:
    """Processes that stay from test to test."""
    runners = Runners()
    yield runners
    runners.close()


def check(chosen: tuple[Plan, int, Case], *, runners: Runners) -> None:
    """Run one case and end as pytest has it."""
    plan, procs, case = chosen
    conclude(runners.of(plan).run(case, procs=procs))


def conclude(result: Result) -> None:
    """End a test as the result says."""
    if result.result == "skip":
        pytest.skip(result.message)
    if result.result in ("xfail", "waived"):
        pytest.xfail(f"{result.result}: {result.reason}")
    if result.result in BAD_KINDS:
        pytest.fail(text_of(result), pytrace=False)


def _arguments(config: pytest.Config) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = []
    for option in OPTIONS:
        value = config.getoption(f"conformance_{option.strip('-')}")
        words += [] if value is None else [f"{option}={value}"]
    return parser.parse_args(words)
