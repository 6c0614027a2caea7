"""Set-up of a worker that runs MindSpore on the CPU: a rank of an MPI job, or alone."""

from __future__ import annotations

import gc
from collections.abc import Callable

import mindspore

from hpcompat_conformance.context import WorkerContext
from hpcompat_mindspore import autograd, job


def set_up(context: WorkerContext) -> Callable[[], dict[str, int]]:
    """Join the ranks. Returns the tidying that the pool runs after each job."""
    mindspore.set_device("CPU")
    world = job.world()
    assert (world.rank(), world.size()) == (context.rank, context.world_size)
    world.barrier()
    autograd.start_recording()
    gc.collect()
    gc.freeze()
    return _tidy


def _tidy() -> dict[str, int]:
    """Drop what the job left. Returns the number of collectives issued per group."""
    autograd.executor.sync()
    gc.collect()
    autograd.executor.set_enable_grad(True)
    autograd.disable_backward_compat()
    autograd.start_recording()
    return {str(group.ranks): group.num_issued for group in job.groups() if group.size() > 1}
