"""Process groups on the CPU: MPI.

[Note: reductions on the CPU]
A reduction adds the ranks' buffers one after another in the buffer's own dtype: bfloat16 and float16 are rounded after
every addition. ``AVG`` divides the finished sum by the number of ranks, once, in that dtype. The order is that of
torch's gloo, so that the bits are the same: gloo cuts a buffer into one chunk per rank (a number of segments, see
:func:`chunk_size`) and adds chunk ``c`` in the order ``c - 1, c - 2, ..., c`` around the ring of ranks; its
reduce-scatter is that all-reduce without the last step. Here every rank gets what it needs from all others in one
exchange and adds it up by itself, which moves as many bytes, needs no arithmetic from MPI, and does not block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from hpcompat.comm import ReduceOp
from hpcompat.core import agreement
from hpcompat.distributed import DEFAULT_TIMEOUT
from hpcompat.errors import CapabilityError
from hpcompat_mindspore.communicator import Communicator, LocalCommunicator, Work
from hpcompat_mindspore.tensors import HOST, add_arrays

Array = np.ndarray[Any, Any]
_SEGMENT_BYTES = 1 << 20
# MPI's own waiting never leaves the core. A rank that is early would take it from one that still computes.
_SPIN_SECONDS = 0.0005
_NAP_SECONDS = 0.00005
_timeout_seconds = DEFAULT_TIMEOUT.total_seconds()


class MPICommunicator:
    """Non-blocking MPI collectives on numpy arrays. [Note: reductions on the CPU]"""

    reductions = frozenset({ReduceOp.SUM, ReduceOp.AVG})

    def __init__(self, comm: Any, ranks: Sequence[int]) -> None:
        self._comm = comm
        self.ranks = tuple(ranks)
        self._size, self._rank = int(comm.size), int(comm.rank)
        self.num_issued = 0
        # For the second half of an all-reduce, which begins when a rank waits: some wait before the others issue more.
        self._second: Any = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def all_gather(self, output: Array, input: Array) -> Work:
        self.num_issued += 1
        # MPI forbids that the two overlap; a custom collective's input is its slot of the output.
        source = _in_place() if np.may_share_memory(output, input) else _bits(input)
        return _Exchange(self._comm.Iallgather(source, _bits(output)), (output, input))

    def reduce_scatter(self, output: Array, input: Array, op: ReduceOp) -> Work:
        self.num_issued += 1
        received = np.empty_like(input)
        request = self._comm.Ialltoall(_bits(input), _bits(received))
        return _ReduceScatter(self, request, output=output, received=received, op=op, kept=input)

    def all_reduce(self, buffer: Array, op: ReduceOp) -> Work:
        self.num_issued += 1
        if self._second is None:
            self._second = self._comm.Dup()
        chunk = chunk_size(buffer.size, itemsize=buffer.itemsize, num_ranks=self._size)
        padded = HOST.pad(buffer, chunk * self._size)
        received = np.empty_like(padded)
        request = self._comm.Ialltoall(_bits(padded), _bits(received))
        return _AllReduce(self, request, output=buffer, received=received, op=op, kept=padded)

    @property
    def messages(self) -> Any:
        """For messages between two ranks, which do not meet the collectives."""
        return self._comm

    def barrier(self) -> None:
        _Exchange(self._comm.Ibarrier(), (np.empty(0),)).wait()

    def separate(self) -> MPICommunicator:
        return MPICommunicator(self._comm.Dup(), self.ranks)

    def add_up(self, received: Array, op: ReduceOp, *, chunk: int, out: Array) -> None:
        """The sum of the ranks' rows. ``chunk`` elements of the whole buffer are added in one order."""
        rows = received.reshape(self._size, -1)
        length = rows.shape[1]
        first = self._rank * length
        start = 0
        while start < length:
            index = (first + start) // chunk
            end = min(length, (index + 1) * chunk - first)
            _add_around_ring(rows[:, start:end], last=index % self._size, out=out[start:end])
            start = end
        if op is ReduceOp.AVG:
            HOST.divide(out, self._size)

    def gather_now(self, output: Array, input: Array) -> None:
        _Exchange(self._second.Iallgather(_bits(input), _bits(output)), (output, input)).wait()


_in_flight: set[_Exchange] = set()


def progress() -> None:
    """Let what is in flight move on. MPI copies in its own calls only, so the caller makes one before it waits for
    something else: computing and communicating overlap then.
    """
    for exchange in tuple(_in_flight):
        if exchange.request.Test():
            _in_flight.discard(exchange)


class _Exchange:
    """A non-blocking MPI call. Holds its buffers: MPI does not."""

    def __init__(self, request: Any, buffers: tuple[Array, ...]) -> None:
        self.request, self._buffers = request, buffers
        _in_flight.add(self)

    def wait(self) -> None:
        """If that takes long, with notes to the others about what this rank is waiting for."""
        started = time.monotonic()
        while self._buffers and not self.request.Test():
            waited = time.monotonic() - started
            if waited > agreement.PATIENCE_SECONDS:
                agreement.lose_patience()
            if waited < _SPIN_SECONDS:
                os.sched_yield()
            else:
                if waited > _timeout_seconds:
                    # The buffers stay: a rank that comes after all still writes into them.
                    raise RuntimeError(f"expected all ranks within {_timeout_seconds:g} s, but got no sign of some")
                time.sleep(_NAP_SECONDS)
        _in_flight.discard(self)
        self._buffers = ()


class _ReduceScatter:
    """The rows of all ranks on their way here; ``wait`` adds them."""

    def __init__(
        self, group: MPICommunicator, request: Any, *, output: Array, received: Array, op: ReduceOp, kept: Array
    ) -> None:
        self._group, self._op = group, op
        self._exchange = _Exchange(request, (kept, received))
        self._output, self._received = output, received
        self._is_done = False

    def wait(self) -> None:
        if self._is_done:
            return
        self._exchange.wait()
        self._is_done = True
        self._finish(self._received)
        del self._received

    def _finish(self, received: Array) -> None:
        chunk = chunk_size(received.size, itemsize=received.itemsize, num_ranks=self._group.size())
        self._group.add_up(received, self._op, chunk=chunk, out=self._output)


class _AllReduce(_ReduceScatter):
    def _finish(self, received: Array) -> None:
        chunk = received.size // self._group.size()
        total, whole = np.empty(chunk, received.dtype), np.empty(received.size, received.dtype)
        self._group.add_up(received, self._op, chunk=chunk, out=total)
        self._group.gather_now(whole, total)
        self._output[...] = whole[: self._output.size]


def _add_around_ring(rows: Array, *, last: int, out: Array) -> None:
    """Add ``rows`` in descending order around the ring, ``last`` at the end."""
    size = rows.shape[0]
    total = rows[(last - 1) % size]
    for step in range(2, size + 1):
        total = add_arrays(total, rows[(last - step) % size], out=out)


def chunk_size(numel: int, *, itemsize: int, num_ranks: int) -> int:
    """Elements of a buffer that gloo gives each rank to add up."""
    num_segments = max(-(-numel * itemsize // _SEGMENT_BYTES), 2 * num_ranks)
    per_rank = -(-num_segments // num_ranks)
    return per_rank * max(-(-numel // (per_rank * num_ranks)), 1)


def _bits(array: Array) -> Array:
    """The same memory as unsigned integers: MPI knows no bfloat16, and nothing here lets MPI compute."""
    return array.view(f"u{array.itemsize}")


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def set_timeout(timeout: timedelta) -> None:
    """How long a rank waits for the others, from now on; MPI itself waits for ever."""
    global _timeout_seconds
    _timeout_seconds = timeout.total_seconds()


def join() -> Communicator:
    """The world.

    Raises:
        CapabilityError: mpi4py is not installed.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CapabilityError(
            backend="mindspore", capability="MPI", hint=f"{error}; pip install 'hpcompat[mindspore-cpu]'"
        ) from error
    comm = MPI.COMM_WORLD
    if comm.size == 1:
        return LocalCommunicator()
    return MPICommunicator(comm.Dup(), range(comm.size))
