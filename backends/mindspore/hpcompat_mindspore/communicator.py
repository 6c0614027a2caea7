"""Process groups: who talks to whom. One class per transport; the rest of the backend calls the protocol."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hpcompat.comm import ReduceOp
from hpcompat_mindspore.tensors import Buffer


class Work(Protocol):
    """A collective that has been issued."""

    def wait(self) -> None:
        """Return when the output is complete. Waiting twice is fine."""
        ...


class Communicator(Protocol):
    """The ranks of one group, seen from this one. Collectives start at once and end in ``wait``."""

    ranks: tuple[int, ...]
    reductions: frozenset[ReduceOp]
    num_issued: int

    def size(self) -> int: ...
    def rank(self) -> int:
        """This process's place among ``ranks``."""
        ...

    def all_gather(self, output: Buffer, input: Buffer) -> Work: ...
    def reduce_scatter(self, output: Buffer, input: Buffer, op: ReduceOp) -> Work: ...
    def all_reduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        """In place."""
        ...

    def barrier(self) -> None: ...
    def separate(self) -> Communicator:
        """The same ranks with an order of collectives of their own. Collective over them."""
        ...


class DoneWork:
    """Nothing to wait for."""

    def wait(self) -> None: ...


class LocalCommunicator:
    """A group of one, without any transport."""

    reductions = frozenset({ReduceOp.SUM, ReduceOp.AVG})

    def __init__(self, rank: int = 0) -> None:
        self.ranks = (rank,)
        self.num_issued = 0

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def all_gather(self, output: Buffer, input: Buffer) -> Work:
        self.num_issued += 1
        _copy(output, input)
        return DoneWork()

    def reduce_scatter(self, output: Buffer, input: Buffer, op: ReduceOp) -> Work:
        return self.all_gather(output, input)

    def all_reduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        self.num_issued += 1
        return DoneWork()

    def barrier(self) -> None: ...
    def separate(self) -> LocalCommunicator:
        return LocalCommunicator(self.ranks[0])


def _copy(output: Buffer, input: Buffer) -> None:
    if isinstance(output, np.ndarray):
        if not np.shares_memory(output, input):
            output[...] = input
    elif output is not input:
        output.copy_(input)
