"""A script as users write it: steps of microbatches, and what it does about a step that failed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import hpcompat
from fault_matrix.kit import Fault, Kit, Trap
from fault_matrix.points import IN_OPTIMIZER, Point
from fault_matrix.settings import Microbatch, Setting

NUM_IN, NUM_ROWS = 6, 4
# Even, because steps may differ by whether their number is.
_DUMMY = 1000


class NotReached(Exception):
    """The step came to its end: the trap did not spring."""


class Disagreement(Exception):
    """The ranks have agreed to drop the step."""


class Step(NamedTuple):
    """What a step leaves behind: bytes, and the scheduler's events."""

    losses: list[bytes]
    gradients: list[bytes]
    parameters: list[bytes]
    states: list[bytes]
    events: list[Any]


class Script:
    """Trains ``model``. ``point`` is where ``trap`` is laid; the script itself steps into those that are its own."""

    def __init__(
        self, kit: Kit, setting: Setting, model: Any, *, optimizer: str, point: Point | None = None, trap: Trap
    ) -> None:
        self.kit, self.setting, self.model = kit, setting, model
        self.optimizer = kit.optimizer(model, optimizer)
        self._weights = list(hpcompat.parameters(model))
        self._point, self._trap = point, trap
        self._agrees = False

    # A step

    def step(self, number: int) -> Step:
        """One that goes well."""
        self._zero_grad()
        with hpcompat.record_events() as events:
            losses = self.run(number)
        gradients = [_bytes(weight.grad) for weight in self._weights]
        self.kit.step(self.optimizer)
        states = [array.tobytes() for array in self.kit.states(self.optimizer)]
        return Step(
            [_bytes(loss) for loss in losses],
            gradients,
            [_bytes(weight) for weight in self._weights],
            states,
            events,
        )

    def run(self, number: int, *, sets_trap: bool = False) -> list[Any]:
        """Forward and backward of every microbatch of step ``number``; the losses."""
        style = self.setting.style
        self.model.layers[-1].is_short = style.leaves_out and number % 2 == 1
        losses = []
        for index, microbatch in enumerate(style.microbatches):
            if index > style.fails_in:
                self._pass("between microbatches")
            if sets_trap and index == style.fails_in:
                self._trap.set()
            losses.append(self._microbatch(microbatch, _batch(100 * number + index)))
        return losses

    def _microbatch(self, microbatch: Microbatch, batch: Any) -> Any:
        self.model.set_is_last_backward(microbatch.is_last)
        self.model.set_reshard_after_backward(microbatch.is_last)
        self.model.set_requires_gradient_sync(microbatch.sync)
        if not microbatch.all_reduce:
            self.model.set_requires_all_reduce(False)
        inputs = hpcompat.from_numpy(batch)
        self._pass("before forward")
        if self.setting.style.evaluates:
            with hpcompat.no_grad():
                self._loss(inputs)
        if not self.setting.style.calls_backward:
            return self.kit.value_and_grad(self._loss, self._weights)(inputs)[0]
        loss = self._loss(inputs)
        self._pass("before backward")
        hpcompat.backward(loss)
        return loss

    def _loss(self, inputs: Any) -> Any:
        outputs = self.model(inputs)
        return (outputs * outputs).mean()

    def _pass(self, place: str) -> None:
        """Come to a place between two phases of the step."""
        is_well = True
        try:
            if self._point is not None and self._point.id == place:
                self._trap()
        except Fault:
            if not self._agrees:
                raise
            is_well = False
        if self._agrees and not hpcompat.agree(is_well):
            raise Disagreement

    # A step that fails

    def fail_together(self, number: int) -> None:
        """All ranks raise at the same place: each gives up by itself."""
        try:
            self.run(number, sets_trap=True)
            self._pass("before the optimizer steps")
            if self._point is not None and self._point.id == IN_OPTIMIZER:
                self.kit.step(self.optimizer, closure=self._trap)
        except Fault:
            self._drop()
        else:
            raise NotReached

    def fail_alone(self, number: int) -> None:
        """The last rank raises and catches up with the others on a dummy batch; then all agree to drop the step."""
        start = self.model.begin_step()
        is_well = True
        try:
            self.run(number, sets_trap=_is_last_rank())
            self._pass("before the optimizer steps")
        except Fault:
            is_well = False
            with self.model.catch_up(start):
                self.run(_DUMMY + number)
        if hpcompat.agree(is_well):
            raise NotReached
        self._drop()

    def fail_between_phases(self, number: int) -> None:
        """The last rank raises where the ranks agree anyway whether to go on, before each phase of the step."""
        self._agrees = True
        try:
            self.run(number, sets_trap=_is_last_rank())
            self._pass("before the optimizer steps")
        except Disagreement:
            self._drop()
        else:
            raise NotReached
        finally:
            self._agrees = False

    def _drop(self) -> None:
        self.model.reset_iter_state()
        self._zero_grad()

    def _zero_grad(self) -> None:
        """Of the shards alone. The ``zero_grad`` of a wrapped model would hide what ``reset_iter_state`` forgets."""
        for weight in self._weights:
            weight.grad = None


def _is_last_rank() -> bool:
    return hpcompat.get_rank() == hpcompat.get_world_size() - 1


def _batch(number: int) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng([hpcompat.get_rank(), number])
    return numbers.normal(size=(NUM_ROWS, NUM_IN)).astype(np.float32)


def _bytes(tensor: Any) -> bytes:
    return b"" if tensor is None else hpcompat.to_numpy(tensor).tobytes()
