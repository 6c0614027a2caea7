"""Worker processes that stay: a job costs milliseconds, not an import and a rendezvous.

[Note: ways to fail] A job runs on every rank. The pool waits for all answers until the deadline; as soon as one rank
has raised or died, the others get only a short grace, because they are probably stuck in a collective that will never
complete. What is reported, in this order: a death (`WorkerDied`), an exception (`JobFailed`), a missed deadline
(`JobTimeout`), ranks that answered from different places (`RanksDiverged`). Whenever a rank did not answer, or
answered from another place than the rest, all processes are ended and the next job starts new ones.
"""

from __future__ import annotations

import atexit
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from hpcompat_conformance.failures import JobFailed, JobTimeout, RanksDiverged, RemoteError, WorkerDied
from hpcompat_conformance.launcher import SUBPROCESSES, Launcher
from hpcompat_conformance.process import Worker
from hpcompat_conformance.protocol import Job, Reply
from hpcompat_conformance.reference import Reference, refer

Target = str | Callable[..., Any]
TORCH_SETUP = "hpcompat_conformance.on_torch.worker:set_up"


@dataclass
class _Round:
    """What came of one job: each rank is in ``replies`` (in order of arrival), ``exit_codes`` or ``stacks``."""

    replies: dict[int, Reply] = field(default_factory=dict)
    exit_codes: dict[int, int | None] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    tails: dict[int, str] = field(default_factory=dict)

    @property
    def errors(self) -> dict[int, RemoteError]:
        return {rank: reply.error for rank, reply in self.replies.items() if reply.error is not None}

    @property
    def diverged(self) -> dict[str, dict[int, int]]:
        """By the name of a group, then by rank: the positions of the groups on which ranks disagree."""
        positions: dict[str, dict[int, int]] = {}
        for rank, reply in sorted(self.replies.items()):
            for group, position in reply.positions.items():
                positions.setdefault(group, {})[rank] = position
        return {group: ranks for group, ranks in positions.items() if len(set(ranks.values())) > 1}

    @property
    def broken(self) -> bool:
        return bool(self.exit_codes or self.stacks or self.diverged)


class WorkerPool:
    """``world_size`` processes that ran ``setup`` once and then run one job after another, each on all ranks.

    ``launcher`` says how they are started. ``setup``, a module-level function or its name ``"module:function"``, is
    called in each worker with its `context.WorkerContext`. It may return a function that is called after every job and
    returns how many collectives the rank has issued on each group, by the group's name; ranks that name the same group
    must agree, else the job counts as failed.
    Processes start at the first job, and again at the first job after a failure that left a rank stuck or dead.
    Not thread-safe.
    """

    def __init__(
        self,
        world_size: int,
        *,
        setup: Target = TORCH_SETUP,
        launcher: Launcher = SUBPROCESSES,
        grace: float = 3.0,
        start_deadline: float = 120.0,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"expected world_size >= 1, but got {world_size!r}")
        self.world_size = world_size
        self.start_deadline = start_deadline
        self.num_starts = 0
        self._setup = refer(setup)
        self._launcher = launcher
        self._grace = grace
        self._workers: list[Worker] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(self, target: Target, /, *, deadline: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call ``target(**kwargs)`` on every rank; the results by rank.

        ``target`` is a module-level function or its name ``"module:function"``; it finds its rank in
        `context.current`. Arguments and results go through pickle. Raises LaunchFailed, or JobFailed, JobTimeout,
        WorkerDied or RanksDiverged, see the note above.
        """
        reference = refer(target)
        job = Job(reference, pickle.dumps(kwargs), deadline, tuple(sys.path))
        self._drop_dead()
        if not self._workers:
            self._start()
        result = self._do(f"{reference} on {self.world_size} ranks", request=pickle.dumps(job), deadline=deadline)
        return [pickle.loads(result.replies[rank].value or b"") for rank in range(self.world_size)]

    @property
    def is_running(self) -> bool:
        """Whether there are processes that wait for the next job. If not, it will start them."""
        return bool(self._workers)

    def close(self) -> None:
        """End the processes. A later job starts new ones."""
        atexit.unregister(self.close)
        self._end(patience=5.0)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="hpcompat-pool-")
        self.num_starts += 1
        path = [entry for entry in sys.path if entry]
        what = f"set-up {self._setup} on {self.world_size} ranks"
        try:
            scratch = Path(self._scratch.name)
            self._workers = list(self._launcher.launch(self.world_size, scratch=scratch, path=path))
            self._do(what, request=pickle.dumps(self._setup), deadline=self.start_deadline)
        except BaseException:
            self._end(patience=0.0)
            raise

    def _drop_dead(self) -> None:
        # Nothing was asked, so nothing can have been sent: there is only the end of a connection to read.
        dead = [worker for worker in self._workers if worker.connection.poll()]
        if not dead:
            return
        codes = {worker.rank: worker.end(patience=5.0) for worker in dead}
        tails = "\n".join(worker.output_tail() for worker in dead)
        self._end(patience=0.0)
        warnings.warn(f"workers ended between two jobs (rank: exit code): {codes}\n{tails}", stacklevel=3)

    def _do(self, what: str, *, request: bytes, deadline: float) -> _Round:
        """Send the request and collect an answer from each rank. Raises for anything but success."""
        try:
            result = self._collect(request, deadline=deadline)
        except BaseException:
            self._end(patience=0.0)
            raise
        if result.broken:
            self._end(patience=0.0)
        _raise_for(what, result=result, deadline=deadline)
        return result

    def _collect(self, request: bytes, *, deadline: float) -> _Round:
        result = _Round()
        until = time.monotonic() + deadline
        waiting: dict[object, Worker] = {worker.connection: worker for worker in self._workers}
        for worker in self._workers:
            _send(worker, request=request)
        while waiting:
            connections = [worker.connection for worker in waiting.values()]
            ready = wait(connections, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                if not _receive(worker, result=result):
                    until = min(until, time.monotonic() + self._grace)
        self._collect_stacks(list(waiting.values()), result=result)
        return result

    def _collect_stacks(self, hung: list[Worker], *, result: _Round) -> None:
        for worker in hung:
            worker.dump_and_end()
        for worker in hung:
            worker.end(patience=5.0)
            result.stacks[worker.rank] = worker.stacks() or "(no stacks: the process did not react)"

    def _end(self, *, patience: float) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end(patience=patience)
        self._workers = []
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


class PoolSet:
    """Pools by world size, made on demand. Keeps those of one set-up or launcher apart from those of another."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, Reference, Launcher], WorkerPool] = {}

    def __call__(
        self, world_size: int, *, setup: Target = TORCH_SETUP, launcher: Launcher = SUBPROCESSES
    ) -> WorkerPool:
        """The pool of ``world_size`` workers that ``launcher`` starts and that run ``setup``; always the same one."""
        key = (world_size, refer(setup), launcher)
        if key not in self._pools:
            self._pools[key] = WorkerPool(world_size, setup=setup, launcher=launcher)
        return self._pools[key]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _send(worker: Worker, *, request: bytes) -> None:
    try:
        worker.connection.send_bytes(request)
    except BrokenPipeError:
        return  # it died: `_receive` sees the end of the pipe


def _receive(worker: Worker, *, result: _Round) -> bool:
    """Read one answer, or take note of the death. Whether the rank succeeded."""
    try:
        reply: Reply = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        result.exit_codes[worker.rank] = worker.end(patience=5.0)
        result.tails[worker.rank] = worker.output_tail()
        return False
    result.replies[worker.rank] = reply
    return reply.error is None


def _raise_for(what: str, *, result: _Round, deadline: float) -> None:
    if result.exit_codes:
        raise WorkerDied(_describe(f"{what}: a worker died", result=result), exit_codes=result.exit_codes)
    if result.errors:
        raise JobFailed(_describe(f"{what}: failed", result=result), errors=result.errors)
    if result.stacks:
        head = f"{what}: no answer from ranks {sorted(result.stacks)} within {deadline:g} s"
        raise JobTimeout(_describe(head, result=result), stacks=result.stacks)
    if result.diverged:
        raise RanksDiverged(_describe(f"{what}: the ranks ended at different collectives", result=result))


def _describe(head: str, *, result: _Round) -> str:
    parts = [head]
    for rank, code in result.exit_codes.items():
        parts.append(f"--- rank {rank} ended with exit code {code}; its last output:\n{result.tails[rank]}")
    same: dict[str, list[int]] = {}
    for rank, error in result.errors.items():
        same.setdefault(error.traceback.rstrip(), []).append(rank)
    for trace, ranks in same.items():
        parts.append(f"--- {_ranks(ranks)} raised {result.errors[ranks[0]].kind}:\n{trace}")
    for rank, stacks in result.stacks.items():
        parts.append(f"--- rank {rank} was still running and was ended; its stacks:\n{stacks}")
    for group, positions in result.diverged.items():
        parts.append(f"--- collectives issued on group {group!r}, by rank: {positions}")
    return "\n".join(parts)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
