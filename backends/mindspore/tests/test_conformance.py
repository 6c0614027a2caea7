"""The conformance suite on MindSpore: every case passes, or is skipped for what MindSpore lacks on the CPU."""

from __future__ import annotations

import pytest

from conformance_runs import ConformanceRun, Tally, conformance_runs
from conformance_runs import runners as runners
from conformance_runs import tally as tally
from hpcompat_conformance.pytest_cases import Runners


@pytest.mark.parametrize("run", conformance_runs())
def test_case(run: ConformanceRun, runners: Runners, tally: Tally) -> None:
    run.check("hpcompat-mindspore", runners=runners, tally=tally)
