"""The places where a step may raise. Each lays its trap with what users have: hooks, nodes, communication objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fault_matrix.kit import UNITS, Site, Trap

Lay = Callable[[Site], "AbstractContextManager[None] | None"]


@dataclass(frozen=True)
class Point:
    """``lay`` puts the trap in place, before the model is wrapped if ``early``; without it the script itself calls the
    trap there.
    """

    id: str
    lay: Lay | None = None
    early: bool = False
    # Calls to let pass before the one that raises.
    skip: int = 0
    units: tuple[str, ...] = UNITS
    # What a setting must have for a step to come here.
    needs: frozenset[str] = frozenset()
    # Whether ranks that did not fail can go on: not where the one that did may or may not have communicated.
    on_one_rank: bool = True

    def in_place(self, site: Site) -> AbstractContextManager[None]:
        context = None if self.lay is None else self.lay(site)
        return nullcontext() if context is None else context

    def trap(self) -> Trap:
        return Trap(skip=self.skip)


def _nothing(*args: object) -> None: ...


# Forward


def _before_the_gather(site: Site) -> None:
    site.module.register_forward_pre_hook(lambda module, args: site.trap(), prepend=True)


def _after_the_gather(site: Site) -> None:
    site.module.register_forward_pre_hook(lambda module, args: site.trap())


def _in_forward(site: Site) -> None:
    def inside(tensor: Any) -> Any:
        site.trap()
        return tensor

    site.module.inside = inside


def _post_forward(site: Site) -> None:
    """Laid early it runs before the library's own hook, else after it."""
    site.module.register_forward_hook(lambda module, args, output: site.trap())


# Backward


def _output_gradient(site: Site) -> None:
    """Laid early the hook runs before the one that gathers, else after it."""

    def watch(module: Any, args: Any, output: Any) -> None:
        output.register_hook(site.trap)

    site.module.register_forward_hook(watch)


def _node(site: Site) -> None:
    site.module.inside = lambda tensor: site.kit.node(tensor, site.trap)


def _parameter_hook(site: Site) -> None:
    inner = site.module.head if site.unit == "root" else site.module.up
    site.module.inside = site.kit.on_gradient(inner, "weight", site.trap)


def _input_gradient(site: Site) -> None:
    site.module.register_forward_pre_hook(lambda module, args: _watch(args[0], site.trap))


def _watch(tensor: Any, trap: Trap) -> None:
    tensor.register_hook(trap)


def _event(name: str) -> Lay:
    return lambda site: site.kit.at_event(name, site.module, site.trap)


# Communication


def _gather(when: str) -> Lay:
    def lay(site: Site) -> None:
        site.module.set_custom_all_gather(site.kit.gather(**{"before": _nothing, "after": _nothing, when: site.trap}))

    return lay


def _scatter(when: str) -> Lay:
    def lay(site: Site) -> None:
        comm = site.kit.scatter(**{"before": _nothing, "after": _nothing, when: site.trap})
        site.module.set_custom_reduce_scatter(comm)

    return lay


def _all_reduce_hook(site: Site) -> None:
    site.module.set_all_reduce_hook(site.trap)


IN_OPTIMIZER = "in the optimizer's step, before it changes anything"
SCRIPT = ("before forward", "before backward", "between microbatches", "before the optimizer steps", IN_OPTIMIZER)
_SHARDED = frozenset({"shards", "one group"})
_REGATHERED = _SHARDED | {"reshards"}

POINTS = [
    Point("before forward"),
    Point("pre-forward hook, before the gather", _before_the_gather),
    Point("pre-forward hook, after the gather", _after_the_gather),
    Point("in forward", _in_forward),
    Point("post-forward hook, before the reshard", _post_forward, early=True),
    Point("post-forward hook, after the reshard", _post_forward),
    Point("before backward", needs=frozenset({"calls backward"})),
    Point("output gradient, before the gather", _output_gradient, early=True),
    Point("output gradient, after the gather", _output_gradient),
    Point("node in backward", _node),
    Point("parameter hook", _parameter_hook, early=True),
    Point("input gradient, after the reduction", _input_gradient, units=("middle",)),
    Point("post-backward", _event("post_backward")),
    Point("reduction", _event("reduce")),
    Point("custom all-gather in forward, before", _gather("before"), needs=_SHARDED),
    Point("custom all-gather in forward, after", _gather("after"), needs=_SHARDED, on_one_rank=False),
    Point("custom all-gather in backward, before", _gather("before"), skip=1, needs=_REGATHERED),
    Point("custom all-gather in backward, after", _gather("after"), skip=1, needs=_REGATHERED, on_one_rank=False),
    Point("custom reduce-scatter, before", _scatter("before"), needs=_SHARDED),
    Point("custom reduce-scatter, after", _scatter("after"), needs=_SHARDED, on_one_rank=False),
    Point("all-reduce hook", _all_reduce_hook, needs=frozenset({"one group"})),
    Point("between microbatches", needs=frozenset({"microbatches"})),
    Point("before the optimizer steps"),
    # On one rank it comes too late: the others have stepped.
    Point(IN_OPTIMIZER, on_one_rank=False),
]
_BY_ID = {point.id: point for point in POINTS}
_NUMBERED = "event "


def point_of(id: str) -> Point:
    if not id.startswith(_NUMBERED):
        return _BY_ID[id]
    return Point(id, lambda site: site.kit.at_event(None, site.module, site.trap), skip=int(id.removeprefix(_NUMBERED)))


def event_id(number: int) -> str:
    """The id of the point at which the scheduler emits its ``number``-th event of a step."""
    return f"{_NUMBERED}{number}"
