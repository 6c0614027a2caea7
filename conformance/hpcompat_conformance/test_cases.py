"""What ``pytest --pyargs hpcompat_conformance`` collects; see `pytest_cases`."""

from __future__ import annotations

from hpcompat_conformance.case import Case
from hpcompat_conformance.pytest_cases import Runners, check
from hpcompat_conformance.runner import Plan


def test_case(conformance_case: tuple[Plan, int, Case], conformance_runners: Runners) -> None:
    """Each case on each implementation and number of processes."""
    check(conformance_case, runners=conformance_runners)
