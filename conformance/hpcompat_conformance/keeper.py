"""What mpirun starts for each rank: starts the worker, tells the pool how to reach it, and how it ended.

[Note: why not the worker itself] mpirun ends all ranks as soon as one has died, so nobody could ask the others for
their stacks, and it tells the exit code of one only. Nor does it pass pipes on. So it gets one keeper for each rank,
which stays for as long as the pool wants: as far as mpirun can see, all is well until then.

Started as ``python -m hpcompat_conformance.keeper SOCKET WORLD_SIZE SCRATCH`` by `hpcompat_conformance.mpirun`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing import reduction
from multiprocessing.connection import Client
from pathlib import Path

from hpcompat_conformance.process import ChildWorker


def main() -> None:
    """Hand the worker's connection to the pool, wait for the worker's end, then for the pool to hang up."""
    address, world_size, scratch = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    path = [entry for entry in sys.path if entry]
    worker = ChildWorker(rank, world_size=int(world_size), scratch=Path(scratch), path=path)
    with Client(address) as pool, contextlib.suppress(EOFError, ConnectionError):
        pool.send((rank, worker.process.pid))
        reduction.send_handle(pool, worker.connection.fileno(), None)
        worker.connection.close()
        pool.send(worker.process.wait())
        pool.recv()


if __name__ == "__main__":
    main()
