"""Pools of workers without a framework: answers, failures, restarts, the same whatever starts the workers. Functions
that begin with `job` run in workers."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from hpcompat_conformance.context import WorkerContext, current
from hpcompat_conformance.failures import JobFailed, JobTimeout, RanksDiverged, WorkerDied
from hpcompat_conformance.launcher import Launcher
from hpcompat_conformance.mpirun import Mpirun
from hpcompat_conformance.pool import PoolSet, WorkerPool

BARE = "hpcompat_conformance.bare:set_up"
memory: dict[str, int] = {}


@pytest.fixture(scope="module")
def bare_pool(launcher: Launcher) -> Iterator[WorkerPool]:
    with WorkerPool(2, setup=BARE, launcher=launcher, grace=0.2) as pool:
        yield pool


def job_identity() -> tuple[int, int, int]:
    return current().rank, current().world_size, os.getpid()


def job_add(left: int, right: int) -> int:
    return left + right + current().rank


def job_count() -> int:
    memory["calls"] = memory.get("calls", 0) + 1
    return memory["calls"]


def job_raise(rank: int, others: str) -> None:
    if current().rank == rank:
        raise LookupError(f"rank {rank} did not find it")
    if others == "wait":
        job_wait_for_nothing()


def job_wait_for_nothing() -> None:
    threading.Event().wait()


def job_exit(rank: int, code: int) -> None:
    if current().rank == rank:
        print("last words", flush=True)
        os._exit(code)
    job_wait_for_nothing()


def job_crash(rank: int) -> None:
    if current().rank == rank:
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def job_system_exit() -> None:
    sys.exit(3)


def job_unpicklable() -> Callable[[], None]:
    return lambda: None


def job_big(size: int) -> bytes:
    return bytes(size)


class Parcel:
    """An argument whose class only this module has."""

    def __init__(self, content: str) -> None:
        self.content = content


def job_open(parcel: Parcel) -> str:
    return parcel.content


def set_up_that_raises(context: WorkerContext) -> None:
    raise RuntimeError(f"no luck on rank {context.rank}")


def set_up_with_positions(context: WorkerContext) -> Callable[[], dict[str, int]]:
    return lambda: {"everyone": memory.get("calls", 0), f"only rank {context.rank}": context.rank}


def job_count_on_rank_one() -> None:
    if current().rank == 1:
        job_count()


def test_results_come_by_rank(bare_pool: WorkerPool) -> None:
    assert [identity[:2] for identity in bare_pool.run(job_identity)] == [(0, 2), (1, 2)]
    assert bare_pool.run(job_add, left=3, right=4) == [7, 8]


def test_workers_stay(bare_pool: WorkerPool) -> None:
    first = bare_pool.run(job_identity)
    calls = bare_pool.run(job_count)
    assert bare_pool.run(job_identity) == first
    assert bare_pool.run(job_count) == [n + 1 for n in calls]


def test_a_target_by_name(bare_pool: WorkerPool) -> None:
    assert bare_pool.run("os.path:basename", p="a/b") == ["b", "b"]


def test_an_argument_of_a_class_of_the_target_s_module(bare_pool: WorkerPool) -> None:
    assert bare_pool.run(job_open, parcel=Parcel("bread")) == ["bread", "bread"]


def test_a_result_larger_than_the_pipe(bare_pool: WorkerPool) -> None:
    assert bare_pool.run(job_big, size=3_000_000) == [bytes(3_000_000)] * 2


def test_an_exception_on_one_rank(bare_pool: WorkerPool) -> None:
    before = bare_pool.run(job_identity)
    with pytest.raises(JobFailed, match=r"rank 1 raised LookupError:\n") as caught:
        bare_pool.run(job_raise, rank=1, others="return")
    assert list(caught.value.errors) == [1]
    assert caught.value.first.is_a("Exception")
    assert caught.value.first.message == "rank 1 did not find it"
    assert "in job_raise" in str(caught.value)
    assert bare_pool.run(job_identity) == before, "workers that answered need no restart"


def test_the_same_exception_on_all_ranks_is_shown_once(bare_pool: WorkerPool) -> None:
    with pytest.raises(JobFailed) as caught:
        bare_pool.run("json:loads", s="{")
    assert str(caught.value).count("JSONDecodeError: ") == 1
    assert set(caught.value.errors) == {0, 1}


def test_an_exception_while_others_hang(bare_pool: WorkerPool) -> None:
    before = bare_pool.run(job_identity)
    with pytest.raises(JobFailed) as caught:
        bare_pool.run(job_raise, rank=0, others="wait", deadline=600)
    text = str(caught.value)
    assert text.index("rank 0 raised LookupError") < text.index("rank 1 was still running")
    assert "in job_wait_for_nothing" in text
    after = bare_pool.run(job_identity)
    assert not {pid for *_, pid in before} & {pid for *_, pid in after}


def test_a_missed_deadline_shows_every_stack_and_restarts(bare_pool: WorkerPool) -> None:
    before, starts = bare_pool.run(job_identity), bare_pool.num_starts
    with pytest.raises(TimeoutError, match=r"no answer from ranks \[0, 1\] within 0.5 s") as caught:
        bare_pool.run(job_wait_for_nothing, deadline=0.5)
    assert isinstance(caught.value, JobTimeout)
    assert set(caught.value.stacks) == {0, 1}
    assert all("in job_wait_for_nothing" in stack for stack in caught.value.stacks.values())
    after = bare_pool.run(job_identity)
    assert not {pid for *_, pid in before} & {pid for *_, pid in after}
    assert bare_pool.num_starts == starts + 1


def test_a_death_is_reported_with_code_and_output(bare_pool: WorkerPool) -> None:
    with pytest.raises(WorkerDied, match="rank 1 ended with exit code 7") as caught:
        bare_pool.run(job_exit, rank=1, code=7, deadline=600)
    assert caught.value.exit_codes == {1: 7}
    assert "last words" in str(caught.value)
    assert "rank 0 was still running" in str(caught.value)
    assert bare_pool.run(job_add, left=0, right=0) == [0, 1]


def test_a_crash_is_reported_with_its_stack(bare_pool: WorkerPool) -> None:
    with pytest.raises(WorkerDied) as caught:
        bare_pool.run(job_crash, rank=0)
    assert caught.value.exit_codes == {0: -signal.SIGSEGV}
    assert "in job_crash" in str(caught.value)


def test_system_exit_is_an_exception_like_others(bare_pool: WorkerPool) -> None:
    with pytest.raises(JobFailed, match="SystemExit: 3"):
        bare_pool.run(job_system_exit)


def test_a_result_that_cannot_be_sent(bare_pool: WorkerPool) -> None:
    with pytest.raises(JobFailed, match="lambda"):
        bare_pool.run(job_unpicklable)


def test_a_worker_that_dies_between_two_jobs(bare_pool: WorkerPool) -> None:
    [*_, pid] = bare_pool.run(job_identity)[1]
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([handle], [], [])
    os.close(handle)
    with pytest.warns(UserWarning, match=r"workers ended between two jobs.*1: -9"):
        assert bare_pool.run(job_add, left=0, right=0) == [0, 1]


def test_a_set_up_that_raises(launcher: Launcher) -> None:
    with WorkerPool(2, setup=set_up_that_raises, launcher=launcher, grace=0.2) as pool:
        for start in (1, 2):
            # Whichever rank is first; the other may still be importing.
            with pytest.raises(
                JobFailed, match=r"set-up .*:set_up_that_raises on 2 ranks: failed[\s\S]*no luck on rank [01]"
            ):
                pool.run(job_identity)
            assert pool.num_starts == start


def test_ranks_that_answer_from_different_places() -> None:
    with WorkerPool(2, setup=set_up_with_positions, grace=0.2) as pool:
        before = pool.run(job_count)
        assert before == [1, 1]
        with pytest.raises(RanksDiverged, match=r"group 'everyone', by rank: \{0: 1, 1: 2\}"):
            pool.run(job_count_on_rank_one)
        assert pool.run(job_count) == [1, 1], "expected new workers"


def test_closed_pools_leave_no_process(launcher: Launcher) -> None:
    pool = WorkerPool(2, setup=BARE, launcher=launcher)
    pids = [pid for *_, pid in pool.run(job_identity)]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_interrupting_the_caller_ends_the_workers(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(1, setup=BARE, launcher=launcher) as pool:
        [(*_, pid)] = pool.run(job_identity)

        def interrupted(*args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("hpcompat_conformance.pool.wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.run(job_wait_for_nothing)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert pool.run(job_add, left=1, right=1) == [2]


def test_pool_set_keeps_one_pool_for_each_size_set_up_and_launcher() -> None:
    pools = PoolSet()
    assert pools(2, setup=BARE) is pools(2, setup=BARE)
    assert pools(2, launcher=Mpirun()) is pools(2, launcher=Mpirun())
    assert pools(2, launcher=Mpirun()) is not pools(2, launcher=Mpirun(queued=True))
    assert pools(2, setup=BARE) is not pools(1, setup=BARE)
    assert pools(2, setup=BARE) is not pools(2)
    pools.close()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("no_colon", "written 'module:function'"),
        (":f", "written 'module:function'"),
        (lambda: None, "module-level function"),
    ],
)
def test_targets_that_cannot_be_named(bare_pool: WorkerPool, target: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bare_pool.run(target)  # type: ignore[arg-type]


def test_a_pool_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="expected world_size >= 1, but got 0"):
        WorkerPool(0)
