"""Recording collectives by standing in for the methods of the backend's communicators, through which they all go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcompat_conformance.framework import Collective
from hpcompat_mindspore.communicator import LocalCommunicator
from hpcompat_mindspore.mpi import MPICommunicator

CLASSES = (LocalCommunicator, MPICommunicator)
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@contextmanager
def record() -> Iterator[list[Collective]]:
    """The collectives that this process issues inside the block, in order."""
    log: list[Collective] = []
    originals = {(owner, kind): getattr(owner, kind) for owner in CLASSES for kind in KINDS}
    try:
        for (owner, kind), original in originals.items():
            setattr(owner, kind, _recording(original, kind=kind, log=log))
        yield log
    finally:
        for (owner, kind), original in originals.items():
            setattr(owner, kind, original)


def _recording(original: Callable[..., Any], *, kind: str, log: list[Collective]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stand_in(group: Any, *args: Any) -> Any:
        before = len(log)
        work = original(group, *args)
        # One collective may be made of others, which are no more than how it is done.
        sizes = [argument.size for argument in args if hasattr(argument, "dtype")]
        log[before:] = [Collective(kind, group.ranks, max(sizes), str(args[0].dtype))]
        return work

    return stand_in
