"""Pools whose workers are the ranks of one MPI job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

from hpcompat.cli.launch import find_mpirun, mpi_environment
from hpcompat_conformance.failures import LaunchFailed
from hpcompat_conformance.process import Traces, Worker

START_DEADLINE = 60.0
END_PATIENCE = 5.0
LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Mpirun:
    """All ranks on this machine, more of them than cores if need be, in the environment of ``hpcompat launch``; with
    ``queued``, MindSpore queues its operations, as it does by itself and as ``hpcompat launch`` tells it not to.
    ``executable`` is the mpirun to use instead of the one that ``hpcompat launch`` finds."""

    queued: bool = False
    executable: str | None = None

    def missing(self) -> list[str]:
        return [] if self.executable or find_mpirun() else ["mpirun"]

    def launch(self, world_size: int, *, scratch: Path, path: Sequence[str]) -> Sequence[Worker]:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(scratch / "socket"))
            server.listen(world_size)
            server.settimeout(LOOK_EVERY)
            job = _Job(self._start(world_size, scratch=scratch, path=path), scratch=scratch)
            until = time.monotonic() + START_DEADLINE
            try:
                for _ in range(world_size):
                    job.meet(server, until=until)
            except BaseException:
                job.end()
                raise
        return sorted(job.workers, key=lambda worker: worker.rank)

    def _start(self, world_size: int, *, scratch: Path, path: Sequence[str]) -> subprocess.Popen[bytes]:
        mpirun = self.executable or find_mpirun()
        if mpirun is None:
            raise LaunchFailed("expected mpirun, but got none; install it with: pip install 'hpcompat[mindspore-cpu]'")
        command = [mpirun, "-n", str(world_size), "--oversubscribe", "--bind-to", "none", sys.executable]
        command += ["-m", "hpcompat_conformance.keeper", str(scratch / "socket"), str(world_size), str(scratch)]
        environ = mpi_environment()
        if self.queued:
            del environ["MS_DEV_LAUNCH_BLOCKING"]
        environ |= {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        with _output_file(scratch).open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                # Ctrl-C is for the pool, which then ends its workers.
                start_new_session=True,
            )


class RankWorker(Traces):
    """A worker in the hands of a keeper (see the note in `keeper`), which says how it ended."""

    def __init__(self, rank: int, connection: Connection, *, pid: int, keeper: Connection, job: _Job) -> None:
        super().__init__(rank, scratch=job.scratch)
        self.rank, self.connection, self.keeper = rank, connection, keeper
        self.has_ended = self._is_dumping = False
        self._pid, self._job = pid, job
        self._exit_code: int | None = None

    def dump_and_end(self) -> None:
        self._is_dumping = True
        self._signal(signal.SIGUSR1)

    def end(self, *, patience: float) -> int | None:
        if self._is_dumping and not self.connection.closed:
            self.connection.poll(patience)  # its end shows here even if the keeper is gone
        self.connection.close()
        if not self.has_ended:
            if not self._hear(patience):
                self._signal(signal.SIGKILL)
                self._hear(END_PATIENCE)
            self.has_ended = True
            self._job.end_if_idle()
        return self._exit_code

    def output_tail(self) -> str:
        return f"{super().output_tail()}\n{self._job.output()}".strip()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _hear(self, patience: float) -> bool:
        """Whether the keeper says within ``patience`` seconds that the worker has ended."""
        try:
            heard = self.keeper.poll(patience)
            if heard:
                self._exit_code = self.keeper.recv()
        except (EOFError, ConnectionError):
            return False  # somebody killed the keeper
        return heard


class _Job:
    """mpirun, and the workers that it keeps."""

    def __init__(self, process: subprocess.Popen[bytes], *, scratch: Path) -> None:
        self.scratch = scratch
        self.workers: list[RankWorker] = []
        self._process = process

    def meet(self, server: socket.socket, *, until: float) -> None:
        """Get to know one more worker, from the call of its keeper."""
        keeper = self._accept(server, until=until)
        try:
            rank, pid = keeper.recv()
            connection = Connection(reduction.recv_handle(keeper))
        except (EOFError, ConnectionError) as error:
            raise LaunchFailed(f"expected a worker for each rank, but got: {self.output()}") from error
        self.workers.append(RankWorker(rank, connection, pid=pid, keeper=keeper, job=self))

    def output(self) -> str:
        """What mpirun and the keepers wrote."""
        return _output_file(self.scratch).read_text(errors="replace").strip()

    def end_if_idle(self) -> None:
        """Nothing is left to keep once all workers have ended."""
        if all(worker.has_ended for worker in self.workers):
            self.end()

    def end(self) -> None:
        """End mpirun, which ends the keepers."""
        for worker in self.workers:
            worker.connection.close()
            worker.keeper.close()
        self._process.terminate()
        try:
            self._process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _accept(self, server: socket.socket, *, until: float) -> Connection:
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
        raise LaunchFailed(f"expected a call from each rank's keeper, but got: {self.output()}")


def _output_file(scratch: Path) -> Path:
    return scratch / "mpirun.output"
