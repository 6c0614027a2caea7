"""Pools that mpirun starts, where they can fail in ways of their own. `test_pool` has what all pools have in common."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from hpcompat_conformance import mpirun
from hpcompat_conformance.context import current
from hpcompat_conformance.failures import JobTimeout, LaunchFailed
from hpcompat_conformance.mpirun import Mpirun
from hpcompat_conformance.pool import WorkerPool

BARE = "hpcompat_conformance.bare:set_up"


def job_processes() -> tuple[int, int]:
    """Of the worker and of its keeper."""
    return os.getpid(), os.getppid()


def job_wait_for_nothing() -> None:
    threading.Event().wait()


def job_environment(name: str) -> str | None:
    return os.environ.get(name)


def job_rank_of_mpi() -> bool:
    return os.environ["OMPI_COMM_WORLD_RANK"] == str(current().rank)


def executable(tmp_path: Path, *, script: str) -> str:
    """A shell script as the mpirun to use."""
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    assert Mpirun().missing() == ["mpirun"]
    with WorkerPool(2, setup=BARE, launcher=Mpirun()) as pool, pytest.raises(LaunchFailed, match="but got none; inst"):
        pool.run(job_processes)


def test_an_mpirun_that_fails_is_quoted(tmp_path: Path) -> None:
    fails = executable(tmp_path, script="echo no slots left >&2; exit 1")
    with WorkerPool(2, setup=BARE, launcher=Mpirun(executable=fails)) as pool:
        for start in (1, 2):
            with pytest.raises(LaunchFailed, match="a call from each rank's keeper, but got: no slots left"):
                pool.run(job_processes)
            assert (pool.num_starts, pool.is_running) == (start, False)


def test_an_mpirun_that_starts_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = executable(tmp_path, script=f"echo $$ > {tmp_path}/pid; echo wait >&2; exec tail -f /dev/null")
    monkeypatch.setattr(mpirun, "START_DEADLINE", 1.0)
    pool = WorkerPool(2, setup=BARE, launcher=Mpirun(executable=waits))
    with pytest.raises(LaunchFailed, match="but got: wait"):
        pool.run(job_processes)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_workers_are_ranks_of_the_job(stand_in: str) -> None:
    with WorkerPool(2, setup=BARE, launcher=Mpirun(executable=stand_in)) as pool:
        assert pool.run(job_rank_of_mpi) == [True, True]
        assert pool.run(job_environment, name="MS_DEV_LAUNCH_BLOCKING") == ["1", "1"]
        assert pool.run(job_environment, name="OMP_NUM_THREADS") == ["1", "1"]


def test_queued_leaves_mindspore_to_its_ways(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_DEV_LAUNCH_BLOCKING", raising=False)
    with WorkerPool(1, setup=BARE, launcher=Mpirun(executable=stand_in, queued=True)) as pool:
        assert pool.run(job_environment, name="MS_DEV_LAUNCH_BLOCKING") == [None]


def test_workers_are_asked_and_ended_even_without_their_keepers(stand_in: str) -> None:
    with WorkerPool(2, setup=BARE, launcher=Mpirun(executable=stand_in)) as pool:
        processes = pool.run(job_processes)
        for _, keeper in processes:
            os.kill(keeper, signal.SIGKILL)
        with pytest.raises(JobTimeout) as caught:
            pool.run(job_wait_for_nothing, deadline=0.5)
        assert all("in job_wait_for_nothing" in stack for stack in caught.value.stacks.values())
        assert set(pool.run(job_processes)).isdisjoint(processes)
