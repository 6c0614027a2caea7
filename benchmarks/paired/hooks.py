"""Where the host's time goes: the functions that each implementation runs around a unit, timed.

The tables below name them; to look closer, add rows. A kind may have several functions, and functions may call each
other: time counts for the innermost one that is listed. A function must be named where its caller looks it up, and a
class is patched before any model is wrapped, because hooks keep bound methods. Timing a call costs about 2 us itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COLLECTIVE = "collective"
WAIT = "wait for collective"

_NATIVE = "torch.distributed.fsdp._fully_shard"
_NATIVE_STATE = f"{_NATIVE}._fsdp_state:FSDPState"
_NATIVE_GROUP = f"{_NATIVE}._fsdp_param_group:FSDPParamGroup"
_OUR_GROUP = "hpcompat.core.param_group:ParamGroup"

_COLLECTIVES: tuple[tuple[str, str], ...] = (
    (COLLECTIVE, "torch.distributed:all_gather_single"),
    (COLLECTIVE, "torch.distributed:all_gather_into_tensor"),
    (COLLECTIVE, "torch.distributed:reduce_scatter_single"),
    (COLLECTIVE, "torch.distributed:reduce_scatter_tensor"),
    (COLLECTIVE, "torch.distributed:all_reduce"),
)

HOOKS: dict[str, tuple[tuple[str, str], ...]] = {
    "native": (
        ("pre-forward", f"{_NATIVE_STATE}._pre_forward"),
        ("post-forward", f"{_NATIVE_STATE}._post_forward"),
        ("pre-backward", f"{_NATIVE_STATE}._pre_backward"),
        ("post-backward", f"{_NATIVE_GROUP}.post_backward"),
        ("final callback", f"{_NATIVE_STATE}._root_post_backward_final_callback"),
        *_COLLECTIVES,
    ),
    "hpcompat": (
        ("pre-forward", "hpcompat.core.around:AroundForward.before"),
        ("post-forward", "hpcompat.core.around:AroundForward.after"),
        ("pre-backward", "hpcompat.core.unit:Unit.pre_backward"),
        ("post-backward", f"{_OUR_GROUP}.post_backward"),
        ("final callback", "hpcompat.core.iteration:Iteration.final_callback"),
        *_COLLECTIVES,
        (WAIT, "hpcompat_torch.collectives:GatherInFlight.wait"),
        (WAIT, "hpcompat_torch.reduction:ReductionInFlight._wait_for_work"),
    ),
}
"""Implementation -> (kind, "module:qualified name") of its functions."""

STAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "native": (
        ("unshard", f"{_NATIVE_GROUP}.unshard"),
        ("wait for unshard", f"{_NATIVE_GROUP}.wait_for_unshard"),
        ("reshard", f"{_NATIVE_GROUP}.reshard"),
        ("reduce", f"{_NATIVE}._fsdp_param_group:foreach_reduce"),
    ),
    "hpcompat": (
        ("unshard", f"{_OUR_GROUP}.unshard"),
        ("wait for unshard", f"{_OUR_GROUP}.wait_for_unshard"),
        ("reshard", f"{_OUR_GROUP}.reshard"),
        ("reduce", f"{_OUR_GROUP}._reduce"),
        ("reduce", "hpcompat_torch.reduction:ReductionInFlight.complete"),
    ),
}
"""What the hooks call, for `--profile stages`: the same time, split further."""


@dataclass
class KindTime:
    """Calls and time of one kind, the time of listed functions called from within left out."""

    num_calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, num_calls: int, seconds: float, cpu_seconds: float) -> None:
        self.num_calls += num_calls
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds


@dataclass
class HookClock:
    """Adds up the time spent in the functions it wraps."""

    kinds: dict[str, KindTime] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _inner: list[KindTime] = field(default_factory=list)

    def wrap(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, on the clock."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(KindTime())
            start, cpu_start = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu_start
                inner = self._inner.pop()
                self.kinds[kind].add(1, seconds - inner.seconds, cpu_seconds - inner.cpu_seconds)
                if self._inner:
                    self._inner[-1].add(0, seconds, cpu_seconds)

        return timed

    def take(self) -> dict[str, KindTime]:
        """What was measured since the last call; the clock starts again from 0."""
        taken = self.kinds
        self.kinds = {kind: KindTime() for kind in taken}
        return taken


@contextmanager
def hook_clock(targets: tuple[tuple[str, str], ...]) -> Iterator[HookClock]:
    """Put functions on a clock inside the block; those that do not exist are listed as missing."""
    clock = HookClock()
    originals: list[tuple[Any, str, Any]] = []
    try:
        for kind, target in targets:
            clock.kinds.setdefault(kind, KindTime())
            try:
                owner, name, attribute = _locate(target)
            except (ImportError, AttributeError):
                clock.missing.append(target)
                continue
            originals.append((owner, name, attribute))
            if isinstance(attribute, (staticmethod, classmethod)):
                setattr(owner, name, type(attribute)(clock.wrap(kind, attribute.__func__)))
            else:
                setattr(owner, name, clock.wrap(kind, attribute))
        yield clock
    finally:
        for owner, name, attribute in reversed(originals):
            setattr(owner, name, attribute)


def _locate(target: str) -> tuple[Any, str, Any]:
    module_name, _, qualified_name = target.partition(":")
    *path, name = qualified_name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module_name))
    return owner, name, inspect.getattr_static(owner, name)
