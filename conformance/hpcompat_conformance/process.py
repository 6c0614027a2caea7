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

STDERR_TAIL_CHARS = 4000


class Worker:
    """Starts on construction. The pipe is inherited by number: nobody else holds its other end, so it closes when, and
    only when, the process ends."""

    def __init__(self, rank: int, *, world_size: int, scratch: Path, path: Sequence[str]) -> None:
        self.rank = rank
        self._stacks = scratch / f"rank{rank}.stacks"
        self._output = scratch / f"rank{rank}.output"
        ours, theirs = Pipe()
        self.connection: Connection = ours
        command = [sys.executable, "-m", "hpcompat_conformance.worker"]
        command += ["--connection", str(theirs.fileno()), "--rank", str(rank), "--world-size", str(world_size)]
        command += ["--scratch", str(scratch)]
        with theirs, self._output.open("wb") as output:
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
        """Ask for the stacks; the process ends by itself afterwards (see the note in `worker`)."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """The stacks it wrote, if it was asked to."""
        return self._stacks.read_text(errors="replace").strip() if self._stacks.exists() else ""

    def output_tail(self) -> str:
        """The end of what the process wrote to stdout and stderr."""
        return self._output.read_text(errors="replace")[-STDERR_TAIL_CHARS:].strip()

    def end(self, *, patience: float) -> int | None:
        """Hang up, wait ``patience`` seconds for the process to go by itself, else kill it. Returns the exit code."""
        self.connection.close()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
