"""The suite against the implementations it comes with."""

from __future__ import annotations

import pytest

from hpcompat_conformance import expected, runner
from hpcompat_conformance.case import all_cases
from hpcompat_conformance.impl import adapter_named
from hpcompat_conformance.results import BAD_KINDS


@pytest.mark.parametrize("implementation", ["torch-fsdp2", "hpcompat-torch", "hpcompat-mindspore"])
def test_everything_ends_as_expected(implementation: str) -> None:
    adapter = adapter_named(implementation)
    missing = adapter.missing()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    path = expected.default_path(implementation)
    gaps = expected.load_gaps(path, known_cases=[one.id for one in all_cases()]) if path else []
    run = runner.run(runner.Plan(adapter, all_cases(), gaps=gaps))
    bad = [f"{one.id} on {one.procs}: {one.result}\n{one.message}" for one in run.results if one.result in BAD_KINDS]
    assert not bad, "\n\n".join(bad)
    # Native FSDP2 has gaps, and nothing to run some cases on.
    assert run.totals["pass"] > 0.7 * len(run.results)
