"""What came of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# The order of the table and of the totals.
KINDS = ("pass", "fail", "xfail", "xpass", "skip", "waived", "error", "timeout")
BAD_KINDS = frozenset({"fail", "error", "timeout", "xpass"})
# From what nobody need look at to what somebody must.
BY_SEVERITY = ("pass", "skip", "xfail", "waived", "xpass", "fail", "error", "timeout")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """One case on one number of processes.

    ``result``: pass; fail (the case raised); error (it could not be run to its end: an implementation that does not
    load, a process that died); timeout; skip (the implementation lacks a capability); xfail and xpass (a gap that was
    expected is there, or is not); waived (it would be bad, but for a waiver). ``message`` says more for all but pass,
    ``headline`` the exception alone, without the stacks; ``reason`` and ``link`` are those of the gap or waiver.
    """

    id: str
    clause: str
    procs: int
    result: str
    seconds: float
    message: str = ""
    headline: str = ""
    reason: str = ""
    link: str = ""


@dataclass(frozen=True)
class Origin:
    """Where and how a run was made. ``date`` is in UTC, ISO 8601; ``command`` repeats the run."""

    spec: str
    seed: int
    procs: tuple[int, ...]
    date: str
    machine: str
    command: str


@dataclass(frozen=True)
class Run:
    """All results for one implementation. ``seconds`` includes the start of processes."""

    implementation: str
    versions: Mapping[str, str]
    results: Sequence[Result]
    seconds: float = 0.0
    origin: Origin | None = None

    @property
    def totals(self) -> dict[str, int]:
        """How many results there are of each kind."""
        counts = Counter(result.result for result in self.results)
        return {kind: counts[kind] for kind in KINDS}

    @property
    def ok(self) -> bool:
        """Whether everything went as expected, and something was checked."""
        return bool(self.results) and not any(result.result in BAD_KINDS for result in self.results)


def worst(results: Iterable[Result]) -> str:
    """The most alarming kind among them; `NOT_RUN` if there are none."""
    return max((result.result for result in results), key=BY_SEVERITY.index, default=NOT_RUN)
