"""What a framework gives to the matrix, and the trap that every place calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import hpcompat
from hpcompat.core import events

Callback = Callable[..., None]

UNITS = ("first", "middle", "root")
NUM_LAYERS, NUM_IN, NUM_HIDDEN, NUM_OUT = 3, 6, 7, 5


class Fault(Exception):
    """Out of memory, or whatever else a step may die of."""


class Trap:
    """Raises when it is called, once, if it is set; lets ``skip`` calls pass before."""

    def __init__(self, *, skip: int = 0) -> None:
        self._skip = skip
        self._left = -1
        self.has_sprung = False

    def set(self) -> None:
        self._left = self._skip

    def __call__(self, *args: object) -> None:
        """Takes and ignores what hooks get, and returns nothing, which in a hook means: no change."""
        self._left -= 1
        if self._left == -1:
            self.has_sprung = True
            raise Fault("the trap")


class Kit(Protocol):
    """One implementation of the training API, with what the neutral calls do not cover."""

    name: str

    def fully_shard(self, module: Any, **options: Any) -> Any: ...
    def replicate(self, module: Any, **options: Any) -> Any: ...
    def mixed_policy(self) -> Any:
        """Compute in float16, reduce in float32."""
        ...

    def net(self) -> Any:
        """A new model, the same on every rank: three residual ``layers`` of two linear maps, ``up`` and ``down``, and a
        linear ``head``. Layers and model have a function ``inside``, first the identity, which their forward applies to
        a tensor that parameters on both sides depend on. A layer whose ``is_short`` is set uses only ``down.bias``.
        """
        ...

    def node(self, tensor: Any, callback: Callback) -> Any:
        """``tensor``, behind a node of the graph whose backward calls ``callback``."""
        ...

    def on_gradient(self, module: Any, attribute: str, callback: Callback) -> Callable[[Any], Any]:
        """Let ``callback`` be called with the gradient of a parameter of ``module``. Returns what ``module`` has to
        have as its function ``inside`` for it.
        """
        ...

    def gather(self, *, before: Callback, after: Callback) -> Any:
        """An all-gather for ``set_custom_all_gather`` that calls something before and after it communicates."""
        ...

    def scatter(self, *, before: Callback, after: Callback) -> Any: ...
    def at_event(self, name: str | None, module: Any, callback: Callback) -> AbstractContextManager[None]:
        """While open, call ``callback`` when the unit of ``module`` comes to ``"post_backward"`` or ``"reduce"``;
        without a name, at each event of hpcompat's scheduler.
        """
        ...

    def value_and_grad(self, function: Callable[..., Any], weights: list[Any]) -> Callable[..., Any]: ...
    def optimizer(self, model: Any, kind: str) -> Any:
        """``kind`` is ``"adamw"`` or ``"sgd"``, with momentum."""
        ...

    def step(self, optimizer: Any, *, closure: Callback | None = None) -> None:
        """An optimizer step; ``closure`` is called first, inside."""
        ...

    def states(self, optimizer: Any) -> list[Any]:
        """Every state of the optimizer as a numpy array, in the order of the parameters."""
        ...


@contextmanager
def at_hpcompat_event(name: str | None, module: Any, callback: Callback) -> Iterator[None]:
    """:meth:`Kit.at_event` of every backend of hpcompat."""

    def listen(event: events.Event) -> None:
        if name is None or (event.name, event.unit) == (name, module._unit().fqn):
            callback()

    events.listeners.append(listen)
    try:
        yield
    finally:
        events.listeners.remove(listen)


class NeutralKit:
    """What kits of hpcompat have in common, whatever the framework; the rest of :class:`Kit` is the framework's."""

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return hpcompat.fully_shard(module, **options)

    def replicate(self, module: Any, **options: Any) -> Any:
        return hpcompat.replicate(module, **options)

    def at_event(self, name: str | None, module: Any, callback: Callback) -> AbstractContextManager[None]:
        return at_hpcompat_event(name, module, callback)

    def value_and_grad(self, function: Callable[..., Any], weights: list[Any]) -> Callable[..., Any]:
        return hpcompat.value_and_grad(function, weights)

    def step(self, optimizer: Any, *, closure: Callback | None = None) -> None:
        hpcompat.optimizer_step(optimizer, closure)


def unchanged(tensor: Any) -> Any:
    return tensor


class LayerParts:
    """Two linear maps around a relu: what a layer of :meth:`Kit.net` does, for a module class of any framework."""

    def make_parts(self, linear: Callable[[int, int], Any]) -> None:
        self.up, self.down = linear(NUM_IN, NUM_HIDDEN), linear(NUM_HIDDEN, NUM_IN)
        self.inside: Callable[[Any], Any] = unchanged
        self.is_short = False

    def run(self, inputs: Any, *, relu: Callable[[Any], Any]) -> Any:
        if self.is_short:
            return inputs + self.down.bias
        return inputs + self.down(self.inside(relu(self.up(inputs))))


class Traps:
    """A mixin for collectives: something to call before and after they communicate."""

    def __init__(self, *, before: Callback, after: Callback) -> None:
        self.before, self.after = before, after

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.before()
        work = super().__call__(*args, **options)  # type: ignore[misc]
        self.after()
        return work


@dataclass
class Site:
    """Where a trap is laid."""

    kit: Kit
    model: Any
    unit: str
    trap: Trap

    @property
    def module(self) -> Any:
        return module_of(self.model, self.unit)


def module_of(model: Any, unit: str) -> Any:
    return model if unit == "root" else model.layers[UNITS.index(unit)]
