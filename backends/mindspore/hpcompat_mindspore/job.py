"""The ranks of this job and the groups among them, over whatever transport there is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import mindspore

from hpcompat.distributed import timeout_from_environment
from hpcompat.errors import CapabilityError
from hpcompat_mindspore import mpi
from hpcompat_mindspore.communicator import Communicator, LocalCommunicator

_world: Communicator | None = None
_members: dict[tuple[int, ...], Communicator] = {}
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def world() -> Communicator:
    """All ranks; joins them on the first call.

    Raises:
        CapabilityError: started by msrun or torchrun on the CPU, or mpi4py is not installed.
    """
    global _world
    if _world is None:
        _world = _join()
    return _world


def set_timeout(timeout: timedelta) -> None:
    """How long a rank waits for the others, from now on.

    Raises:
        CapabilityError: not over MPI.
    """
    if mindspore.get_context("device_target") != "CPU":
        raise CapabilityError(
            backend="mindspore",
            capability="a timeout of collectives",
            hint=f"hccl takes its own from HCCL_EXEC_TIMEOUT and HCCL_CONNECT_TIMEOUT, but got {timeout}; set those",
        )
    mpi.set_timeout(timeout)


def has_joined() -> bool:
    return _world is not None


def leave() -> None:
    """Forget all groups; the next call of :func:`world` joins again."""
    global _world
    _world = None
    _members.clear()


def group_of(ranks: Sequence[int]) -> Communicator:
    """The communicator of ``ranks``; made once. Collective over them."""
    key = tuple(ranks)
    if key not in _members:
        everyone = world()
        if key == everyone.ranks:
            _members[key] = everyone
        elif len(key) == 1:
            _members[key] = LocalCommunicator(key[0])
        else:
            _members[key] = _subgroup(everyone, key)
    return _members[key]


def groups() -> list[Communicator]:
    """Every communicator that this process has made, the world first."""
    return list(dict.fromkeys([world(), *_members.values()]))


def _subgroup(everyone: Any, ranks: tuple[int, ...]) -> Communicator:
    if not isinstance(everyone, mpi.MPICommunicator):
        from hpcompat_mindspore.hccl import HcclCommunicator

        return HcclCommunicator(ranks)
    members = everyone._comm.group.Incl(ranks)
    # Only the members take part, so that pipeline stages can wrap at different times.
    return mpi.MPICommunicator(everyone._comm.Create_group(members), ranks)


def _join() -> Communicator:
    timeout = timeout_from_environment()
    if timeout is not None:
        set_timeout(timeout)
    if mindspore.get_context("device_target") != "CPU":
        from hpcompat_mindspore import hccl

        return hccl.join()
    if any(name in os.environ for name in _MPI_VARIABLES) or "mpi4py.MPI" in sys.modules:
        return mpi.join()
    for launcher, variable in (("msrun", "MS_WORKER_NUM"), ("torchrun", "WORLD_SIZE")):
        if int(os.environ.get(variable, "1")) <= 1:
            continue
        # Each process would take itself for a job of one and train alone.
        raise CapabilityError(
            backend="mindspore",
            capability=f"{launcher} on the CPU",
            hint="MindSpore's own CPU collectives lack reduce-scatter and bfloat16; start the script with "
            "hpcompat launch, which uses MPI",
        )
    return LocalCommunicator()
