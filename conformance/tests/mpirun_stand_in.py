"""Treats the processes it starts as mpirun does, without MPI: tells each its rank, passes no pipes on, and ends all as
soon as one has failed. ``mpirun_stand_in.py -n N [OPTIONS] PYTHON ARGUMENTS``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main() -> int:
    number = int(sys.argv[sys.argv.index("-n") + 1])
    command = sys.argv[sys.argv.index(sys.executable) :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(number):
            ranks.append(subprocess.Popen(command, env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}))
        for _ in ranks:
            _, status = os.wait()
            if status != 0:
                return 1
    finally:
        for process in ranks:
            process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
