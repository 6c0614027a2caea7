"""One worker process, seen from the pool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

STDERR_TAIL_CHARS = 4000


class Worker(Protocol):
    """What a pool needs of a process that runs `hpcompat_conformance.worker`.

    ``connection`` leads to it and nobody else holds the other end, so it closes when, and only when, the process ends.
    """

    rank: int
    connection: Connection

    def dump_and_end(self) -> None:
        """Ask for the stacks; the process ends by itself afterwards (see the note in `worker`)."""

    def end(self, *, patience: float) -> int | None:
        """Hang up, wait ``patience`` seconds for the process to go by itself, else kill it. Returns the exit code;
        None if nobody knows it. Once more does nothing more."""

    def stacks(self) -> str:
        """The stacks it wrote, if it was asked to."""

    def output_tail(self) -> str:
        """The end of what the process wrote to stdout and stderr."""


class Traces:
    """What a worker leaves in the scratch directory of its pool."""

    def __init__(self, rank: int, *, scratch: Path) -> None:
        self.output_file = scratch / f"rank{rank}.output"
        self._stacks_file = scratch / f"rank{rank}.stacks"

    def stacks(self) -> str:
        return self._stacks_file.read_text(errors="replace").strip() if self._stacks_file.exists() else ""

    def output_tail(self) -> str:
        return self.output_file.read_text(errors="replace")[-STDERR_TAIL_CHARS:].strip()


class ChildWorker(Traces):
    """A child of this process. Starts on construction; its end of the pipe is inherited by number."""

    def __init__(self, rank: int, *, world_size: int, scratch: Path, path: Sequence[str]) -> None:
        super().__init__(rank, scratch=scratch)
        self.rank = rank
        ours, theirs = Pipe()
        self.connection: Connection = ours
        command = [sys.executable, "-m", "hpcompat_conformance.worker"]
        command += ["--connection", str(theirs.fileno()), "--rank", str(rank), "--world-size", str(world_size)]
        command += ["--scratch", str(scratch)]
        with theirs, self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                # Ctrl-C is for the pool, which then ends its workers.
                start_new_session=True,
            )

    def dump_and_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def end(self, *, patience: float) -> int | None:
        self.connection.close()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
