"""The suite against torch's implementations, ours and its own."""

from __future__ import annotations

import pytest

from conformance_runs import ConformanceRun, Tally, conformance_runs
from conformance_runs import runners as runners
from conformance_runs import tally as tally
from hpcompat_conformance.pytest_cases import Runners

pytest.importorskip("torch")


@pytest.mark.parametrize("run", conformance_runs(all_by_default=True))
def test_ours(run: ConformanceRun, runners: Runners, tally: Tally) -> None:
    run.check("hpcompat-torch", runners=runners, tally=tally)


@pytest.mark.parametrize("run", conformance_runs())
def test_native(run: ConformanceRun, runners: Runners, tally: Tally) -> None:
    """It has gaps, and nothing to run some cases on."""
    run.check("torch-fsdp2", runners=runners, tally=tally)
