"""Running cases: which, on how many processes, and what to call the outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hpcompat_conformance import execute
from hpcompat_conformance.case import Case
from hpcompat_conformance.expected import Gap
from hpcompat_conformance.failures import JobFailed, JobTimeout, PoolError, RanksDiverged
from hpcompat_conformance.impl import Adapter
from hpcompat_conformance.pool import WorkerPool
from hpcompat_conformance.reference import refer
from hpcompat_conformance.results import Result, Run

DEFAULT_TIMEOUT = 60.0
DEFAULT_SEED = 2026


class Listener(Protocol):
    """Told what is going on, while it does."""

    def started(self, case: Case, *, procs: int) -> None: ...

    def finished(self, result: Result) -> None: ...


class Silence:
    """A listener that does nothing."""

    def started(self, case: Case, *, procs: int) -> None: ...

    def finished(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What to run. A case runs on those of ``procs`` that it is written for."""

    adapter: Adapter
    cases: Sequence[Case]
    procs: Sequence[int] = (1, 2, 4)
    gaps: Sequence[Gap] = ()
    timeout: float = DEFAULT_TIMEOUT
    seed: int = DEFAULT_SEED

    def cases_on(self, procs: int) -> list[Case]:
        """The cases to run on that many processes."""
        return [case for case in self.cases if procs in case.procs]

    @property
    def size(self) -> int:
        """The number of results to come."""
        return sum(len(self.cases_on(procs)) for procs in self.procs)


def run(plan: Plan, *, listener: Listener | None = None) -> Run:
    """Run the plan, fewest processes first, one pool of workers for each number of processes."""
    listener = listener or Silence()
    results: list[Result] = []
    versions: Mapping[str, str] = {}
    for procs in sorted(set(plan.procs)):
        cases = plan.cases_on(procs)
        if not cases:
            continue
        with WorkerPool(procs, setup=plan.adapter.worker_setup, launcher=plan.adapter.launcher) as pool:
            for case in cases:
                result, versions = _run_one(pool, case=case, plan=plan, versions=versions, listener=listener)
                results.append(result)
                listener.finished(result)
    return Run(plan.adapter.name, versions, results)


def _run_one(
    pool: WorkerPool, *, case: Case, plan: Plan, versions: Mapping[str, str], listener: Listener
) -> tuple[Result, Mapping[str, str]]:
    """The result, and the implementation's versions as far as they are known by now."""
    listener.started(case, procs=pool.world_size)
    if not pool.is_running:
        # Outside the case's time: the first in new processes would pay for importing the framework.
        try:
            versions = pool.run(execute.versions, load=refer(plan.adapter.load))[0]
        except PoolError as error:
            return Result(case.id, case.clause, pool.world_size, "error", 0.0, str(error)), versions
    start = time.perf_counter()
    kind, message = _attempt(pool, case=case, plan=plan)
    result = Result(case.id, case.clause, pool.world_size, kind, time.perf_counter() - start, message)
    gaps = [gap for gap in plan.gaps if gap.applies(case.id, procs=pool.world_size, versions=versions)]
    return _against_expectation(result, gap=gaps[0] if gaps else None), versions


def _attempt(pool: WorkerPool, *, case: Case, plan: Plan) -> tuple[str, str]:
    try:
        outcomes = pool.run(
            execute.execute,
            deadline=plan.timeout,
            case=case.reference,
            requires=case.requires,
            load=refer(plan.adapter.load),
            seed=plan.seed,
        )
    except JobTimeout as error:
        return "timeout", str(error)
    except JobFailed as error:
        not_run = any(remote.is_a(execute.CaseNotRun.__name__) for remote in error.errors.values())
        return "error" if not_run else "fail", str(error)
    except RanksDiverged as error:
        return "fail", str(error)
    except PoolError as error:
        return "error", str(error)
    if isinstance(outcomes[0], execute.Skipped):
        return "skip", f"no {outcomes[0].capability}"
    return "pass", ""


def _against_expectation(result: Result, *, gap: Gap | None) -> Result:
    if gap is None or result.result == "skip":
        return result
    if result.result == "pass":
        message = f"expected to fail ({gap.reason}; {gap.link}), but it passes: remove the entry"
        return replace(result, result="xpass", message=message)
    if gap.saying not in result.message:
        return result
    return replace(result, result="xfail", message=f"{gap.reason} ({gap.link})\n{result.message}")
