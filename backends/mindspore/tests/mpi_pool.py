"""A pool of workers that are the ranks of one MPI job: the conformance suite's pool, started by mpirun."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpcompat.cli.launch import find_mpirun, mpi_environment
from hpcompat_conformance.pool import WorkerPool

SETUP = "mindspore_setup:set_up"
STDERR_TAIL_CHARS = 4000


class MpiRank:
    """One rank, with the surface of ``hpcompat_conformance.process.Worker``. ``process`` is mpirun, shared by all."""

    def __init__(self, rank: int, connection: Connection, *, pid: int, job: MpiJob) -> None:
        self.rank, self.connection, self.process = rank, connection, job.process
        self._pid, self._job = pid, job

    def dump_and_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)

    def stacks(self) -> str:
        path = self._job.scratch / f"rank{self.rank}.stacks"
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def output_tail(self) -> str:
        return self._job.output.read_text(errors="replace")[-STDERR_TAIL_CHARS:].strip()

    def end(self, *, patience: float) -> int | None:
        self.connection.close()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class MpiJob:
    """mpirun and its ranks."""

    def __init__(self, world_size: int, *, scratch: Path, path: list[str], queued: bool) -> None:
        self.scratch, self.output, self._queued = scratch, scratch / "output", queued
        address = str(scratch / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(world_size)
            server.settimeout(60.0)
            self.process = self._start(world_size, address=address, path=path)
            self.ranks = sorted((self._accept(server) for _ in range(world_size)), key=lambda rank: rank.rank)

    def _start(self, world_size: int, *, address: str, path: list[str]) -> subprocess.Popen[bytes]:
        mpirun = find_mpirun()
        assert mpirun is not None, "expected mpirun of the openmpi package"
        command = [mpirun, "-n", str(world_size), "--oversubscribe", "--bind-to", "none", sys.executable]
        command += ["-m", "mpi_worker", address, str(world_size), str(self.scratch)]
        environ = {**mpi_environment(), **os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        if self._queued:
            environ.pop("MS_DEV_LAUNCH_BLOCKING")
        with self.output.open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def _accept(self, server: socket.socket) -> MpiRank:
        try:
            accepted, _ = server.accept()
        except TimeoutError as error:
            self.process.kill()
            raise RuntimeError(f"expected all ranks to call back, but got: {self.output.read_text()}") from error
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        rank, pid = connection.recv()
        return MpiRank(rank, connection, pid=pid, job=self)


class MpiPool(WorkerPool):
    """``world_size`` ranks of MPI with MindSpore in each; ``queued`` if it shall queue operations, as it does by itself
    and as `hpcompat launch` tells it not to."""

    def __init__(self, world_size: int, *, queued: bool = False, **options: Any) -> None:
        super().__init__(world_size, setup=SETUP, **options)
        self._queued = queued

    def _start(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="hpcompat-mpi-")
        self.num_starts += 1
        path = [entry for entry in sys.path if entry]
        job = MpiJob(self.world_size, scratch=Path(self._scratch.name), path=path, queued=self._queued)
        self._workers = list(job.ranks)  # type: ignore[arg-type]
        self._do(f"set-up of {self.world_size} ranks", request=pickle.dumps(self._setup), deadline=self._start_deadline)


Ranks = Callable[..., MpiPool]
