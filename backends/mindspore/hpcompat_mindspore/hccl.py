"""Process groups on Ascend: ``mindspore.mint.distributed`` over hccl. Has not run on the hardware yet.

Every call is checked against the signatures of the installed functions, and the class runs in the tests over a
recording stand-in for the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor
from mindspore.communication import GlobalComm
from mindspore.mint import distributed

from hpcompat.comm import ReduceOp
from hpcompat_mindspore.communicator import Communicator, Work


class HcclCommunicator:
    """A group of ``mint.distributed``; collectives are looked up there at call time."""

    # hccl has no average: the scheduler sums and divides.
    reductions = frozenset({ReduceOp.SUM})

    def __init__(self, ranks: Sequence[int], *, name: str | None = None) -> None:
        self.ranks = tuple(ranks)
        # Only the members take part, so that pipeline stages can wrap at different times.
        self._name = name or distributed.new_group(list(self.ranks), use_local_synchronization=True)
        self.num_issued = 0

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(distributed.get_rank())

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        self.num_issued += 1
        return _HcclWork(distributed.all_gather_into_tensor(output, input, group=self._name, async_op=True))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp) -> Work:
        self.num_issued += 1
        handle = distributed.reduce_scatter_tensor(output, input, op=_name_of(op), group=self._name, async_op=True)
        return _HcclWork(handle)

    def all_reduce(self, buffer: Tensor, op: ReduceOp) -> Work:
        self.num_issued += 1
        return _HcclWork(distributed.all_reduce(buffer, op=_name_of(op), group=self._name, async_op=True))

    def barrier(self) -> None:
        distributed.barrier(group=self._name)

    def separate(self) -> Communicator:
        return HcclCommunicator(self.ranks)


class _HcclWork:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
            self._handle = None


def _name_of(op: ReduceOp) -> str:
    assert op is ReduceOp.SUM, f"hccl has no {op}"
    return "sum"


def join() -> Communicator:
    """The world, started if nobody has."""
    if not distributed.is_initialized():
        distributed.init_process_group()
    return HcclCommunicator(range(distributed.get_world_size()), name=GlobalComm.WORLD_COMM_GROUP)
