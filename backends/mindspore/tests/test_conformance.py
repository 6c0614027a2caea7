"""The conformance suite's cases on MindSpore."""

from __future__ import annotations

import pytest

from hpcompat_conformance import execute
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.reference import refer
from hpcompat_conformance.runner import DEFAULT_SEED
from mpi_pool import Ranks

CASES = [(case, num_ranks) for case in all_cases() for num_ranks in case.procs]


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    sorted(CASES, key=lambda pair: pair[1]),
    ids=lambda value: value.id if isinstance(value, Case) else str(value),
)
def test_case(ranks: Ranks, case: Case, num_ranks: int) -> None:
    outcomes = ranks(num_ranks).run(
        execute.execute,
        case=case.reference,
        requires=case.requires,
        load=refer("ms_framework:load"),
        seed=DEFAULT_SEED,
    )
    if isinstance(outcomes[0], execute.Skipped):
        pytest.skip(f"MindSpore on the CPU lacks {outcomes[0].capability}")
