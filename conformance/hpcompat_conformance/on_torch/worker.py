"""Set-up of a worker that runs torch on the CPU: gloo over the loopback interface, one thread."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpcompat_conformance.context import WorkerContext
from hpcompat_conformance.on_torch import groups


def set_up(context: WorkerContext) -> Callable[[], dict[str, int]]:
    """Join the process group. Returns the tidying that the pool runs after each job."""
    torch.set_num_threads(1)
    # By host name gloo may pick an address that a sandbox does not route.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=_store(context), rank=context.rank, world_size=context.world_size)
    dist.barrier()
    shelf = groups.install()
    _collect_garbage()
    return lambda: _tidy(shelf)


def _tidy(shelf: groups.GroupShelf) -> dict[str, int]:
    """Drop what the job left. Returns the number of collectives issued per group."""
    _collect_garbage()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    world: Any = dist.group.WORLD
    if world is None:
        raise RuntimeError("expected the job to leave the default process group alone, but it is gone")
    shelf.put_back()
    return {"world": world._get_sequence_number_for_group(), **shelf.positions()}


def _collect_garbage() -> None:
    """What survives is almost all modules and caches. Frozen, those hundred thousand objects are not looked at again:
    else each collection would cost a tenth of a second."""
    gc.collect()
    gc.freeze()


def _store(context: WorkerContext) -> Any:
    """A TCP store on a port that the system chose. The other ranks learn it through a file: a port picked beforehand
    may be taken by the time it is used."""
    port_file = dist.FileStore(str(context.scratch / "port"), context.world_size)
    if context.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, context.world_size, is_master=True, wait_for_workers=False)
        port_file.set("port", str(store.port))
        return store
    port = int(port_file.get("port"))
    return dist.TCPStore("127.0.0.1", port, context.world_size, is_master=False, wait_for_workers=False)
