"""Collectives that have been issued and are completed when the scheduler says so: base classes for a backend's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedGroup, ReduceRequest
    from hpcompat.contract.states import ShardedState

Param = TypeVar("Param")


class GatherInFlight:
    """An all-gather and its flat output, ``[world size, elements per rank]``; ``output`` is ``None`` where nothing
    travels.
    """

    __slots__ = ("event", "is_async", "output", "owner", "source", "work", "world_size")

    def __init__(
        self,
        output: Any,
        *,
        source: ShardedState,
        world_size: int,
        work: Any = None,
        event: Any = None,
        owner: HookedGroup | None = None,
    ) -> None:
        self.output = output
        self.source = source
        self.world_size = world_size
        self.work = work
        self.event = event
        self.is_async = work is not None
        self.owner = owner


class ReductionInFlight(ABC, Generic[Param]):
    """A reduction whose collective has been issued; holds everything needed to finish it."""

    def __init__(self, *, params: Sequence[Param], request: ReduceRequest, orig_dtype: Any) -> None:
        self.params = params
        self.request = request
        self.orig_dtype = orig_dtype
        self.work: Any = None
        # The one that ``work`` belongs to, for errors.
        self._collective = "reduce-scatter"
        self.post_stream = request.reduce_stream
        self.post_event: Any = None
        self._is_done = False

    def complete(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._wait_for_work()
        if self.request.pledge is not None:
            self.request.pledge.settle()
        self._finish()

    def abandon(self) -> None:
        self._is_done = True
        self._wait_for_work()
        self.release_input()

    @abstractmethod
    def _wait_for_work(self) -> None: ...
    @abstractmethod
    def _finish(self) -> None:
        """The hook, the division, the scale and the cast, in this order; then the gradients go to the shards."""

    @abstractmethod
    def release_input(self) -> None: ...
