"""Collectives that cannot be completed: another rank has ended, or does not come. Which one it was, for which unit.

[Note: last words]
Whoever launched the ranks ends the others when one has died: torchrun as soon as it looks, mpirun at once. Both send
``SIGTERM`` first. A rank that computes at that time, or waits where its transport sees no death (MPI), would end
without a word. So it says which collectives it was in and then ends as it would have. A handler of the script's own is
left alone. While all is well nothing is noted for this but the last collective that was begun.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from hpcompat.errors import CollectiveError

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedGroup
    from hpcompat.core.iteration import IteratedUnit

ADVICE = (
    "Another rank has ended, hangs or is that far behind: its own first error says why. Start the job again from a "
    "checkpoint; for ranks that are only slow pass init_process_group(timeout=...) or set HPCOMPAT_TIMEOUT, in seconds"
)
_MAX_NAMES = 3
logger = logging.getLogger("hpcompat")


def failed(error: BaseException, *, collective: str, owner: HookedGroup | None) -> CollectiveError:
    """What to raise from the transport's ``error``. ``owner`` is the param group whose collective it was."""
    global _has_failed
    _has_failed = True
    cause = str(error).strip().rstrip(".")
    if owner is None:
        return CollectiveError(
            f"expected every rank in {collective}, but got: {cause}. {ADVICE}", collective=collective
        )
    where = f"the {collective} of {describe(owner)}"
    message = f"expected every rank in {where}, but got on {_this_rank(owner)}: {cause}. {ADVICE}"
    return CollectiveError(message, collective=collective, unit=owner.fqn)


@contextmanager
def naming(collective: str) -> Iterator[None]:
    """For collectives that belong to no unit."""
    try:
        yield
    except (CollectiveError, NotImplementedError):
        raise
    except RuntimeError as error:
        raise failed(error, collective=collective, owner=None) from error


def describe(group: HookedGroup) -> str:
    """``unit 'layers.0' (parameter group 1 of 2: 'layers.0.w', ...)``"""
    names = [repr(name) for name in group.tensors.names]
    rest = len(names) - _MAX_NAMES
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    return f"{_name_of(group)} (parameter group {group.index + 1} of {group.num_groups}: {shown})"


def _name_of(group: HookedGroup) -> str:
    return f"unit {group.fqn!r}" if group.fqn else "the root unit"


def _this_rank(group: HookedGroup) -> str:
    distributed = group.distributed
    return f"rank {distributed.get_rank(None)} of {distributed.get_world_size(None)}"


# [Note: last words]

_roots: weakref.WeakSet[IteratedUnit] = weakref.WeakSet()
_installed_in: int | None = None
# Then an error says the same already.
_has_failed = False


def watch(root: IteratedUnit) -> None:
    """From now on, have last words about ``root`` and what is below. Called once per root.

    Not on accelerators: a thread that waits for the device runs no handler, and would only end later. There the
    transport has a watchdog of its own.
    """
    global _installed_in
    if root.comm_ctx.has_streams:
        return
    _roots.add(root)
    if _installed_in == os.getpid() or threading.current_thread() is not threading.main_thread():
        return
    if root.backend.distributed.get_world_size(None) > 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _say_last_words)
        _installed_in = os.getpid()


def _say_last_words(number: int, frame: FrameType | None) -> None:
    try:
        # Not in a process that this one has forked, such as a data loader's.
        if _installed_in == os.getpid() and not _has_failed:
            for text in map(_last_words, _roots):
                logger.error("%s", text)
    finally:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _last_words(root: IteratedUnit) -> str:
    units = root.iteration.units
    groups = [group for unit in units for group in unit.groups]
    pending = [*root.comm_ctx.pending(), *filter(None, (group.pending() for group in groups))]
    if not pending and root.comm_ctx.last_begun is not None:
        pending, what = [root.comm_ctx.last_begun], "in or after"
    else:
        what = "in"
    doing = " and ".join(f"the {collective} of {describe(group)}" for collective, group in pending)
    who = _this_rank(groups[0]) if groups else "this rank"
    return (
        f"{who} was told to end (SIGTERM) {what} {doing or 'no collective'}. If its launcher did that, another rank "
        "has ended: its own first error says why, or the launcher's message which signal ended it"
    )
