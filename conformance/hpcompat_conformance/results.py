"""What came of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The order of the table and of the totals.
KINDS = ("pass", "fail", "xfail", "xpass", "skip", "error", "timeout")
BAD_KINDS = frozenset({"fail", "error", "timeout", "xpass"})


@dataclass(frozen=True)
class Result:
    """One case on one number of processes.

    ``result``: pass; fail (the case raised); error (it could not be run to its end: an implementation that does not
    load, a process that died); timeout; skip (the implementation lacks a capability); xfail and xpass (a gap that was
    expected is there, or is not). ``message`` says more for all but pass.
    """

    id: str
    clause: str
    procs: int
    result: str
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class Run:
    """All results for one implementation."""

    implementation: str
    versions: Mapping[str, str]
    results: Sequence[Result]

    @property
    def totals(self) -> dict[str, int]:
        """How many results there are of each kind."""
        counts = Counter(result.result for result in self.results)
        return {kind: counts[kind] for kind in KINDS}

    @property
    def ok(self) -> bool:
        """Whether everything went as expected, and something was checked."""
        return bool(self.results) and not any(result.result in BAD_KINDS for result in self.results)
