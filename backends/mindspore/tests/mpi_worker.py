"""One rank of an :class:`mpi_pool.MpiPool`: calls back the pool, then serves jobs as any worker does.

mpirun passes no pipes on to the ranks, so they connect to a socket of the pool's.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client

from hpcompat_conformance import worker


def main() -> None:
    address, world_size, scratch = sys.argv[1:]
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    connection = Client(address)
    connection.send((int(rank), os.getpid()))
    options = {
        "--connection": str(connection.fileno()),
        "--rank": rank,
        "--world-size": world_size,
        "--scratch": scratch,
    }
    worker.main([word for option in options.items() for word in option])


if __name__ == "__main__":
    main()
