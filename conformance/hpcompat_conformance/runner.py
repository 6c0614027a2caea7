"""Running cases: which, on how many processes, and what to call the outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hpcompat_conformance import execute
from hpcompat_conformance.case import Case
from hpcompat_conformance.expected import Gap
from hpcompat_conformance.failures import JobFailed, JobTimeout, PoolError, RanksDiverged
from hpcompat_conformance.impl import Adapter
from hpcompat_conformance.pool import PoolSet, WorkerPool
from hpcompat_conformance.reference import refer
from hpcompat_conformance.results import Result, Run
from hpcompat_conformance.waivers import Waiver

DEFAULT_PROCS = (1, 2, 4)
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
    """What to run. A case runs on those of ``procs`` that it is written for. ``dump`` is a directory for the values of
    comparisons that fail."""

    adapter: Adapter
    cases: Sequence[Case]
    procs: Sequence[int] = DEFAULT_PROCS
    gaps: Sequence[Gap] = ()
    waivers: Sequence[Waiver] = ()
    timeout: float = DEFAULT_TIMEOUT
    seed: int = DEFAULT_SEED
    dump: Path | None = None
    today: date = field(default_factory=date.today)

    def cases_on(self, procs: int) -> list[Case]:
        """The cases to run on that many processes."""
        return [case for case in self.cases if procs in case.procs]

    @property
    def size(self) -> int:
        """The number of results to come."""
        return sum(len(self.cases_on(procs)) for procs in self.procs)


class CaseRunner:
    """Runs one case after another; keeps one pool of workers for as long as the number of processes is the same. Use as
    a context manager. With ``pools`` it runs them in those, which are the caller's to close."""

    def __init__(self, plan: Plan, *, pools: PoolSet | None = None) -> None:
        self.plan = plan
        self.versions: Mapping[str, str] = {}
        self._pools = pools
        self._pool: WorkerPool | None = None

    def __enter__(self) -> CaseRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, case: Case, *, procs: int) -> Result:
        """The result of one case, measured against what is expected of it."""
        pool = self._pool_of(procs)
        if not (pool.is_running and self.versions):
            # Outside the case's time: the first in new processes would pay for importing the framework.
            try:
                load = refer(self.plan.adapter.load)
                self.versions = pool.run(execute.versions, deadline=pool.start_deadline, load=load)[0]
            except PoolError as error:
                return self._judge(Result(case.id, case.clause, procs, "error", 0.0, str(error), _headline(error)))
        start = time.perf_counter()
        kind, message, headline = _attempt(pool, case=case, plan=self.plan)
        seconds = time.perf_counter() - start
        return self._judge(Result(case.id, case.clause, procs, kind, seconds, message, headline))

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _pool_of(self, procs: int) -> WorkerPool:
        adapter = self.plan.adapter
        if self._pools is not None:
            return self._pools(procs, setup=adapter.worker_setup, launcher=adapter.launcher)
        if self._pool is None or self._pool.world_size != procs:
            self.close()
            self._pool = WorkerPool(procs, setup=adapter.worker_setup, launcher=adapter.launcher)
        return self._pool

    def _judge(self, result: Result) -> Result:
        plan, name = self.plan, self.plan.adapter.name
        gaps = [gap for gap in plan.gaps if gap.applies(result.id, procs=result.procs, versions=self.versions)]
        result = _against_gap(result, gap=gaps[0] if gaps else None)
        for waiver in plan.waivers:
            if waiver.applies(result, implementation=name, versions=self.versions, today=plan.today):
                end = waiver.until or ", ".join(f"{name} {bound}" for name, bound in waiver.versions.items())
                message = f"waived, with {end}: {waiver.reason}\n{result.message}"
                return replace(result, result="waived", message=message, reason=waiver.reason, link=waiver.link)
        return result


def run(plan: Plan, *, listener: Listener | None = None) -> Run:
    """Run the plan, fewest processes first, one pool of workers for each number of processes.

    Ctrl-C ends it early: the results so far, fewer than ``plan.size``.
    """
    listener = listener or Silence()
    results: list[Result] = []
    start = time.perf_counter()
    with CaseRunner(plan) as cases, suppress(KeyboardInterrupt):
        for procs in sorted(set(plan.procs)):
            for case in plan.cases_on(procs):
                listener.started(case, procs=procs)
                results.append(cases.run(case, procs=procs))
                listener.finished(results[-1])
    return Run(plan.adapter.name, cases.versions, results, time.perf_counter() - start)


def dump_folder(root: Path, *, implementation: str, case: str, procs: int) -> Path:
    """Where the values of a case's failed comparison go."""
    return root / implementation / f"{case}-on-{procs}"


def _attempt(pool: WorkerPool, *, case: Case, plan: Plan) -> tuple[str, str, str]:
    """Kind, message and headline."""
    folder = None
    if plan.dump is not None:
        folder = dump_folder(plan.dump, implementation=plan.adapter.name, case=case.id, procs=pool.world_size)
    try:
        outcomes = pool.run(
            execute.execute,
            deadline=plan.timeout,
            case=case.reference,
            requires=case.requires,
            load=refer(plan.adapter.load),
            seed=plan.seed,
            dump=folder,
        )
    except PoolError as error:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "message.txt").write_text(f"{error}\n", encoding="utf-8")
        return _kind(error), str(error), _headline(error)
    if isinstance(outcomes[0], execute.Skipped):
        return "skip", f"no {outcomes[0].capability}", ""
    return "pass", "", ""


def _kind(error: PoolError) -> str:
    if isinstance(error, JobTimeout):
        return "timeout"
    if isinstance(error, JobFailed):
        not_run = any(remote.is_a(execute.CaseNotRun.__name__) for remote in error.errors.values())
        return "error" if not_run else "fail"
    return "fail" if isinstance(error, RanksDiverged) else "error"


def _headline(error: PoolError) -> str:
    if isinstance(error, JobFailed):
        return f"{error.first.kind}: {error.first.message}"
    return str(error).partition("\n")[0]


def _against_gap(result: Result, *, gap: Gap | None) -> Result:
    if gap is None or result.result == "skip":
        return result
    if result.result == "pass":
        message = f"expected to fail ({gap.reason}; {gap.link}), but it passes: remove the entry"
        return replace(result, result="xpass", message=message, reason=gap.reason, link=gap.link)
    if gap.saying not in result.message:
        return result
    message = f"{gap.reason} ({gap.link})\n{result.message}"
    return replace(result, result="xfail", message=message, reason=gap.reason, link=gap.link)
