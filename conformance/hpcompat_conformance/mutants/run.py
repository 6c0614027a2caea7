"""Running the must-pass set against mutants: which cases first, and what counts as found."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hpcompat_conformance import execute, spec
from hpcompat_conformance.case import Case
from hpcompat_conformance.failures import JobFailed, JobTimeout, PoolError, RanksDiverged
from hpcompat_conformance.impl import Adapter
from hpcompat_conformance.mutants import worker
from hpcompat_conformance.mutants.plant import Mutant, StaleMutant
from hpcompat_conformance.pool import PoolSet, WorkerPool
from hpcompat_conformance.reference import refer

# Much longer than any case takes: only what hangs is still running. On a machine where a case without a mutant takes
# more than this part of it, a timeout proves nothing.
DEFAULT_TIMEOUT = 20.0
LONGEST_PART = 0.25
# Nothing is known about the suite after one of these.
_NO_VERDICT = (StaleMutant.__name__, execute.CaseNotRun.__name__)


@dataclass(frozen=True)
class Verdict:
    """What came of one mutant.

    ``result``: killed; survived (all cases passed); unmet (all passed, and none called what the mutant replaces); error
    (``message`` says why nothing is known). ``how`` a case killed it: fail, timeout, died, diverged.
    """

    mutant: Mutant
    result: str = "survived"
    how: str = ""
    case: str = ""
    clause: str = ""
    procs: int = 0
    num_runs: int = 0
    seconds: float = 0.0
    message: str = ""


class Listener(Protocol):
    """Told what is going on, while it does."""

    def started(self, mutant: Mutant, case: Case, *, procs: int) -> None: ...

    def finished(self, verdict: Verdict) -> None: ...


@dataclass(frozen=True)
class MutantPlan:
    """Which mutants of the implementation to run which cases against; see `against` for what of ``cases``."""

    adapter: Adapter
    mutants: Sequence[Mutant]
    cases: Sequence[Case]
    procs: Sequence[int] = (1, 2, 4)
    timeout: float = DEFAULT_TIMEOUT
    seed: int = 2026
    version: str = spec.VERSION


def must_pass(cases: Iterable[Case], *, version: str = spec.VERSION) -> list[Case]:
    """The cases of clauses that every implementation must satisfy."""
    clauses = spec.clauses(version)
    return [case for case in cases if clauses[case.clause].level == "must"]


def against(mutant: Mutant, cases: Sequence[Case], *, version: str = spec.VERSION) -> list[Case]:
    """The must-pass set, and what else the mutant names: a promise that hpcompat makes beyond it."""
    must = {case.id for case in must_pass(cases, version=version)}
    return [case for case in cases if case.id in must or case.clause in mutant.likely or case.id in mutant.likely]


def in_order(mutant: Mutant, cases: Sequence[Case], *, procs: Iterable[int]) -> list[tuple[Case, int]]:
    """Every case on every number of processes that it is written for, the likely killers first, and fewer processes
    first: but one process last, where most bugs cannot show."""

    def key(job: tuple[Case, int]) -> tuple[int, bool, int]:
        case, number = job
        names = [index for index, name in enumerate(mutant.likely) if name in (case.clause, case.id)]
        return min(names, default=len(mutant.likely)), number == 1, number

    return sorted(((case, number) for number in set(procs) for case in cases if number in case.procs), key=key)


class MutantRun:
    """One set of warm processes for all mutants: ``pools``, or its own. Use as a context manager."""

    def __init__(self, plan: MutantPlan, *, pools: PoolSet | None = None) -> None:
        self._plan = plan
        self._pools = pools or PoolSet()
        self._closes_pools = pools is None

    def __enter__(self) -> MutantRun:
        return self

    def __exit__(self, *error: object) -> None:
        if self._closes_pools:
            self._pools.close()

    def verdicts(self, listener: Listener) -> Iterator[Verdict]:
        """Of each mutant in turn."""
        for mutant in self._plan.mutants:
            start = time.perf_counter()
            cases = against(mutant, self._plan.cases, version=self._plan.version)
            jobs = in_order(mutant, cases, procs=self._plan.procs)
            verdict = replace(self.judge(mutant, jobs, listener), seconds=time.perf_counter() - start)
            listener.finished(verdict)
            yield verdict

    def judge(self, mutant: Mutant, jobs: Sequence[tuple[Case, int]], listener: Listener) -> Verdict:
        """Run these cases, on these numbers of processes, until one finds the bug."""
        was_met = False
        for number, (case, procs) in enumerate(jobs, start=1):
            listener.started(mutant, case, procs=procs)
            seen = Verdict(mutant, case=case.id, clause=case.clause, procs=procs, num_runs=number)
            try:
                outcomes = self._run(worker.execute_mutated, case, procs=procs, mutant=mutant.reference)
            except PoolError as error:
                return self._found(seen, error, case)
            was_met = was_met or any(outcome.num_calls for outcome in outcomes)
        return Verdict(mutant, "survived" if was_met else "unmet", num_runs=len(jobs))

    def _found(self, seen: Verdict, error: PoolError, case: Case) -> Verdict:
        how = _how(error)
        trouble = str(error) if how == "error" else self._trouble_without(case, procs=seen.procs, how=how)
        if trouble:
            return replace(seen, result="error", message=trouble)
        return replace(seen, result="killed", how=how, message=_reason(error))

    def _trouble_without(self, case: Case, *, procs: int, how: str) -> str:
        """Why the case proves nothing: it fails without a mutant as well (or one was not taken back), or is slow."""
        try:
            if how == "timeout":  # new processes, whose first case is slow
                self._run(execute.execute, case, procs=procs)
            start = time.perf_counter()
            self._run(execute.execute, case, procs=procs)
        except PoolError as error:
            return f"expected the case to pass without the mutant, but got: {error}"
        seconds = time.perf_counter() - start
        if how == "timeout" and seconds > LONGEST_PART * self._plan.timeout:
            return f"expected the case to be quick without the mutant, but it took {seconds:.1f} s: a longer --timeout"
        return ""

    def _run(self, target: Any, case: Case, *, procs: int, **arguments: Any) -> list[Any]:
        pool = self._pool(procs)
        return pool.run(
            target,
            deadline=self._plan.timeout,
            case=case.reference,
            requires=case.requires,
            load=refer(self._plan.adapter.load),
            seed=self._plan.seed,
            **arguments,
        )

    def _pool(self, procs: int) -> WorkerPool:
        adapter = self._plan.adapter
        pool = self._pools(procs, setup=adapter.worker_setup, launcher=adapter.launcher)
        if not pool.is_running:
            # Outside the case's time: the first in new processes would pay for importing the framework.
            pool.run(execute.versions, load=refer(adapter.load))
        return pool


def _how(error: PoolError) -> str:
    if isinstance(error, JobTimeout):
        return "timeout"
    if isinstance(error, RanksDiverged):
        return "diverged"
    if not isinstance(error, JobFailed):
        return "died"
    remotes = list(error.errors.values())
    if any(remote.is_a(name) for remote in remotes for name in _NO_VERDICT):
        return "error"
    return "error" if all(remote.is_a(worker.NotReached.__name__) for remote in remotes) else "fail"


def _reason(error: PoolError) -> str:
    """In one line. The first exception that the bug had a part in."""
    if not isinstance(error, JobFailed):
        return str(error).partition("\n")[0]
    reached = [remote for remote in error.errors.values() if not remote.is_a(worker.NotReached.__name__)]
    return f"{reached[0].kind}: {reached[0].message}".partition("\n")[0]
