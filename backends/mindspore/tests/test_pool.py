"""A rank that raises, dies, hangs or goes its own way is reported with the stacks of the others; the next job runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hpcompat_conformance.adapters.hpcompat_mindspore import ADAPTER
from hpcompat_conformance.failures import JobFailed, JobTimeout, PoolError, RanksDiverged, WorkerDied
from hpcompat_conformance.pool import WorkerPool

EVERYONE = [[0.0, 1.0], [0.0, 1.0]]
STACK_OF_THE_OTHER = [r"rank 0 was still running and was ended; its stacks:\n", r"ms_pool\.py.* in gather"]


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, setup=ADAPTER.worker_setup, launcher=ADAPTER.launcher, grace=0.5) as pool:
        yield pool


def failure(pair: WorkerPool, kind: type[PoolError], job: str, **options: Any) -> Any:
    """What the job raises. Nothing of it is left for the next one."""
    with pytest.raises(kind) as caught:
        pair.run(f"ms_pool:{job}", **options)
    assert pair.run("ms_pool:gather") == EVERYONE
    return caught


def test_an_exception_while_the_other_waits_for_its_data(pair: WorkerPool) -> None:
    caught = failure(pair, JobFailed, "raise_on", rank=1)
    for pattern in (r"rank 1 raised LookupError", *STACK_OF_THE_OTHER):
        caught.match(pattern)


@pytest.mark.parametrize(
    ("job", "code", "trace"), [("exit_on", 7, "last words"), ("crash_on", -signal.SIGSEGV, "in crash_on")]
)
def test_a_death_while_the_other_waits_for_its_data(pair: WorkerPool, job: str, code: int, trace: str) -> None:
    caught = failure(pair, WorkerDied, job, rank=1)
    assert caught.value.exit_codes == {1: code}
    for pattern in (rf"rank 1 ended with exit code {code}", trace, *STACK_OF_THE_OTHER):
        caught.match(pattern)


def test_ranks_that_wait_for_each_other(pair: WorkerPool) -> None:
    caught = failure(pair, JobTimeout, "wait_in_different_collectives", deadline=5.0)
    assert sorted(caught.value.stacks) == [0, 1]
    assert all("in wait_in_different_collectives" in stacks for stacks in caught.value.stacks.values())


def test_a_collective_that_one_rank_alone_issued(pair: WorkerPool) -> None:
    failure(pair, RanksDiverged, "issue_on", rank=1).match(r"collectives issued on group '\(0, 1\)'")


def test_success_restarts_nothing(pair: WorkerPool) -> None:
    before = pair.run("ms_pool:process")
    assert pair.run("ms_pool:gather") == EVERYONE
    assert pair.run("ms_pool:process") == before
