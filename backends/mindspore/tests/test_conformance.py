"""The conformance suite on MindSpore: every case passes, or is skipped for what MindSpore lacks on the CPU."""

from __future__ import annotations

import pytest

from conformance_runs import ConformanceRun, Tally, conformance_runs
from conformance_runs import conformance_runners as conformance_runners
from conformance_runs import tally as tally
from hpcompat_conformance.pytest_cases import Runners


@pytest.mark.parametrize("run", conformance_runs())
def test_case(run: ConformanceRun, conformance_runners: Runners, tally: Tally) -> None:
    run.check("hpcompat-mindspore", runners=conformance_runners, tally=tally)
