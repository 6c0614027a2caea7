"""Recording collectives by standing in for the methods of the backend's communicators, through which they all go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcompat.comm import ReduceOp
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


@contextmanager
def adding_up() -> Iterator[None]:
    """Inside, MPI is what the transport of Ascend is: it adds up, and has no average."""
    originals = {name: getattr(MPICommunicator, name) for name in ("reduce_scatter", "all_reduce", "reductions")}
    try:
        for name in ("reduce_scatter", "all_reduce"):
            setattr(MPICommunicator, name, _adding(originals[name]))
        MPICommunicator.reductions = frozenset({ReduceOp.SUM})
        yield
    finally:
        for name, original in originals.items():
            setattr(MPICommunicator, name, original)


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stand_in(group: Any, *args: Any) -> Any:
        return original(group, *args[:-1], ReduceOp.SUM)

    return stand_in
