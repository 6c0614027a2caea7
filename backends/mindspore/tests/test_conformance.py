"""The conformance suite on MindSpore, as a user runs it: every case passes, or is skipped for what MindSpore lacks."""

from __future__ import annotations

from functools import cache

import pytest

from hpcompat_conformance import runner
from hpcompat_conformance.case import all_cases
from hpcompat_conformance.impl import adapter_named
from hpcompat_conformance.results import Result

CASES = [(case.id, procs) for case in all_cases() for procs in case.procs]


@cache
def results(procs: int) -> dict[str, Result]:
    """What came of all cases on that many processes, by id."""
    plan = runner.Plan(adapter_named("hpcompat-mindspore"), all_cases(), procs=(procs,))
    return {result.id: result for result in runner.run(plan).results}


@pytest.mark.parametrize(("case", "procs"), sorted(CASES, key=lambda pair: pair[1]))
def test_case(case: str, procs: int) -> None:
    result = results(procs)[case]
    if result.result == "skip":
        pytest.skip(f"MindSpore on the CPU has {result.message}")
    assert result.result == "pass", result.message
