"""Process groups: who talks to whom. One class per transport; the rest of the backend calls the protocol.

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
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import mindspore
import numpy as np

from hpcompat.comm import ReduceOp
from hpcompat.core import agreement
from hpcompat.distributed import DEFAULT_TIMEOUT, timeout_from_environment
from hpcompat.errors import CapabilityError
from hpcompat_mindspore.tensors import HOST, Buffer, add_arrays

Array = np.ndarray[Any, Any]
_SEGMENT_BYTES = 1 << 20
# MPI's own waiting never leaves the core. A rank that is early would take it from one that still computes.
_SPIN_SECONDS = 0.0005
_NAP_SECONDS = 0.00005


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


# The world

_world: Communicator | None = None
_timeout_seconds = DEFAULT_TIMEOUT.total_seconds()
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
    """How long a rank waits for the others, from now on; MPI itself waits for ever.

    Raises:
        CapabilityError: not over MPI.
    """
    global _timeout_seconds
    if mindspore.get_context("device_target") != "CPU":
        raise CapabilityError(
            backend="mindspore",
            capability="a timeout of collectives",
            hint=f"hccl takes its own from HCCL_EXEC_TIMEOUT and HCCL_CONNECT_TIMEOUT, but got {timeout}; set those",
        )
    _timeout_seconds = timeout.total_seconds()


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
    if not isinstance(everyone, MPICommunicator):
        from hpcompat_mindspore.hccl import HcclCommunicator

        return HcclCommunicator(ranks)
    members = everyone._comm.group.Incl(ranks)
    # Only the members take part, so that pipeline stages can wrap at different times.
    return MPICommunicator(everyone._comm.Create_group(members), ranks)


def _join() -> Communicator:
    timeout = timeout_from_environment()
    if timeout is not None:
        set_timeout(timeout)
    if mindspore.get_context("device_target") != "CPU":
        from hpcompat_mindspore.hccl import join

        return join()
    if any(name in os.environ for name in _MPI_VARIABLES) or "mpi4py.MPI" in sys.modules:
        return _join_mpi()
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


def _join_mpi() -> Communicator:
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
