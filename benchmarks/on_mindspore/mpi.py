"""MPI on the clock, MPI left out, and MPI alone.

The backend's communicator makes its MPI calls through one attribute, and whatever stands there is used from the next
call on. So one sharded model serves several measurements: with `ClockedComm` around the real communicator, and with
`LoopbackComm`, which talks to nobody. What the clock saw in a step, `replay` does again without MindSpore.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hpcompat_mindspore import job
from hpcompat_mindspore.mpi import _Exchange

Array = np.ndarray[Any, Any]


class Call(NamedTuple):
    """One MPI call: a collective's buffers in bytes, or a `Test` or `Wait` of the request with this number."""

    kind: str
    request: int
    num_sent: int = 0
    num_received: int = 0


@dataclass
class MpiClock:
    """The MPI calls of a step, and the seconds in them: on the wall and of the CPU."""

    calls: list[Call] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    _num_requests: int = 0
    _is_running: bool = False

    def start(self) -> None:
        """Forget what was, at the start of a step."""
        self.calls = []
        self.seconds = self.cpu_seconds = 0.0
        self._num_requests = 0

    def new_request(self) -> int:
        self._num_requests += 1
        return self._num_requests - 1

    def time(self, call: Call, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``; what it does to requests in turn is part of this call."""
        if self._is_running:
            return function(*args)
        self._is_running = True
        start, cpu_start = time.perf_counter(), time.thread_time()
        try:
            return function(*args)
        finally:
            self.cpu_seconds += time.thread_time() - cpu_start
            self.seconds += time.perf_counter() - start
            self.calls.append(call)
            self._is_running = False


class ClockedComm:
    """The two collectives of sharded training on a clock. Others are missing, so that none goes unnoticed."""

    def __init__(self, comm: Any, clock: MpiClock) -> None:
        self._comm, self._clock = comm, clock

    def Iallgather(self, source: Array, target: Array) -> ClockedRequest:
        return self._issue("Iallgather", source, target)

    def Ialltoall(self, source: Array, target: Array) -> ClockedRequest:
        return self._issue("Ialltoall", source, target)

    def _issue(self, kind: str, source: Array, target: Array) -> ClockedRequest:
        number = self._clock.new_request()
        call = Call(kind, number, source.nbytes, target.nbytes)
        return ClockedRequest(self._clock.time(call, getattr(self._comm, kind), source, target), self._clock, number)


class ClockedRequest:
    def __init__(self, request: Any, clock: MpiClock, number: int) -> None:
        self._request, self._clock, self._number = request, clock, number

    def Test(self) -> bool:
        return bool(self._clock.time(Call("Test", self._number), self._request.Test))

    def Wait(self) -> None:
        self._clock.time(Call("Wait", self._number), self._request.Wait)

    def wait_by(self, function: Callable[[Any], None], exchange: Any) -> None:
        """`function(exchange)` waits for this request, by as many calls as it takes: one `Wait`."""
        self._clock.time(Call("Wait", self._number), function, exchange)


class LoopbackComm:
    """The collectives of a communicator without communication: every rank seems to send what this one sends.

    That is a copy in memory, without which the numbers would be whatever was there, possibly slow denormals.
    """

    def __init__(self, comm: Any) -> None:
        self.size, self.rank = comm.size, comm.rank

    def Iallgather(self, source: Array, target: Array) -> LoopbackRequest:
        target.reshape(self.size, -1)[:] = source
        return LoopbackRequest()

    def Ialltoall(self, source: Array, target: Array) -> LoopbackRequest:
        target.reshape(self.size, -1)[:] = source.reshape(self.size, -1)[self.rank]
        return LoopbackRequest()


class LoopbackRequest:
    def Test(self) -> bool:
        return True

    def Wait(self) -> None: ...


@contextmanager
def talking_through(comm: Any) -> Iterator[None]:
    """Let the backend make its MPI calls through ``comm`` inside the block; `world_comm` is its own."""
    world: Any = job.world()
    exchange: Any = _Exchange
    before, world._comm = world._comm, comm
    wait, exchange.wait = exchange.wait, _wait(exchange.wait)
    try:
        yield
    finally:
        world._comm, exchange.wait = before, wait


def _wait(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """`function`, which polls a request, on the clock as one call: between two looks it does nothing else."""

    def wait(exchange: Any) -> None:
        request = exchange.request
        if isinstance(request, ClockedRequest):
            request.wait_by(function, exchange)
        else:
            function(exchange)

    return wait


def world_comm() -> Any:
    """The MPI communicator that the backend uses for all ranks."""
    world: Any = job.world()
    return world._comm


def replay(calls: Sequence[Call], comm: Any, buffers: dict[int, list[Array]]) -> Counter[str]:
    """Make ``calls`` on ``comm``, with buffers of the same sizes, which are kept in ``buffers`` for the next time.

    Returns the number of calls of each kind.
    """
    num_calls: Counter[str] = Counter()
    requests: dict[int, Any] = {}
    in_use: dict[int, tuple[Array, Array]] = {}
    for kind, number, num_sent, num_received in calls:
        num_calls[kind] += 1
        if kind == "Test":
            requests[number].Test()
        elif kind == "Wait":
            requests[number].Wait()
            for buffer in in_use.pop(number, ()):
                buffers[buffer.nbytes].append(buffer)
        else:
            pair = _take(buffers, num_sent), _take(buffers, num_received)
            requests[number] = getattr(comm, kind)(*pair)
            in_use[number] = pair
    return num_calls


def make_buffers() -> dict[int, list[Array]]:
    """Nothing yet: the first replay allocates what it needs."""
    return defaultdict(list)


def _take(buffers: dict[int, list[Array]], size: int) -> Array:
    free = buffers[size]
    return free.pop() if free else np.zeros(size, np.uint8)
