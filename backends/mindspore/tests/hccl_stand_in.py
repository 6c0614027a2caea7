"""Stands in for ``mindspore.mint.distributed`` on a machine without an Ascend.

Every call must fit the signature of the installed function, is written down, and is then done by MPI on the tensors'
host memory.
"""

from __future__ import annotations

import inspect
from typing import Any

from mindspore import Tensor
from mindspore.communication import GlobalComm
from mindspore.mint import distributed

from hpcompat.comm import ReduceOp
from hpcompat_mindspore.job import group_of, world
from hpcompat_mindspore.mpi import MPICommunicator


class StandIn:
    """Replaces ``hpcompat_mindspore.hccl.distributed``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._world = world()
        self._groups: dict[Any, Any] = {GlobalComm.WORLD_COMM_GROUP: self._world}

    def _bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = inspect.signature(getattr(distributed, name)).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _done(self, name: str, tensor: Tensor) -> StandIn:
        self.calls.append((name, tensor.nbytes))
        return self

    def wait(self) -> None:
        """As the handle that an asynchronous call returns."""

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, *args: Any, **kwargs: Any) -> int:
        self._bind("get_rank", *args, **kwargs)
        return self._world.rank()

    def get_world_size(self, *args: Any, **kwargs: Any) -> int:
        self._bind("get_world_size", *args, **kwargs)
        return self._world.size()

    def new_group(self, *args: Any, **kwargs: Any) -> str:
        bound = self._bind("new_group", *args, **kwargs)
        assert bound["use_local_synchronization"]
        name = f"group {len(self._groups)}"
        assert isinstance(self._world, MPICommunicator)
        comm = self._world._comm
        ranks = tuple(bound["ranks"])
        members = (
            MPICommunicator(comm.Create_group(comm.group.Incl(ranks)), ranks) if len(ranks) > 1 else group_of(ranks)
        )
        self._groups[name] = members
        return name

    def all_gather_into_tensor(self, *args: Any, **kwargs: Any) -> StandIn:
        bound = self._bind("all_gather_into_tensor", *args, **kwargs)
        output, input = bound["output_tensor"], bound["input_tensor"]
        self._groups[bound["group"]].all_gather(output.asnumpy(), input.asnumpy()).wait()
        return self._done("all_gather", output)

    def reduce_scatter_tensor(self, *args: Any, **kwargs: Any) -> StandIn:
        bound = self._bind("reduce_scatter_tensor", *args, **kwargs)
        assert bound["op"] == "sum"
        self._groups[bound["group"]].reduce_scatter(
            bound["output"].asnumpy(), bound["input"].asnumpy(), ReduceOp.SUM
        ).wait()
        return self._done("reduce_scatter", bound["input"])

    def all_reduce(self, *args: Any, **kwargs: Any) -> StandIn:
        bound = self._bind("all_reduce", *args, **kwargs)
        assert bound["op"] == "sum"
        self._groups[bound["group"]].all_reduce(bound["tensor"].asnumpy(), ReduceOp.SUM).wait()
        return self._done("all_reduce", bound["tensor"])

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        bound = self._bind("barrier", *args, **kwargs)
        self._groups[bound["group"]].barrier()
