"""Which state follows which: every step of real runs is in the tables, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hpcompat
from faults import Fault, at_events
from hpcompat.contract.states import ShardedState, TrainingState
from hpcompat.core import events, prefetch
from hpcompat.core.param_group import ParamGroup
from hpcompat.core.states import GROUP_TRANSITIONS, SHARDED_TRANSITIONS, UNIT_TRANSITIONS
from hpcompat.core.unit import Unit
from hpcompat_conformance import numpy_reference as ref
from training import Net, Stack, batch, train, wrap

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = TrainingState
SHARDED, SHARDED_POST_FORWARD, UNSHARDED = ShardedState

# What really happens, without the changes that reset_iter_state makes (from anything to IDLE and SHARDED), and without
# the state that a group is lent while it is prefetched.
UNIT_STEPS = {
    (IDLE, FORWARD),
    (FORWARD, IDLE),
    (IDLE, PRE_BACKWARD),
    (PRE_BACKWARD, IDLE),
}
GROUP_STEPS = {
    (IDLE, FORWARD),
    (FORWARD, IDLE),
    (IDLE, PRE_BACKWARD),
    (PRE_BACKWARD, POST_BACKWARD),
    (POST_BACKWARD, IDLE),
    (IDLE, POST_BACKWARD),  # no output had a gradient
    (POST_BACKWARD, PRE_BACKWARD),  # called or used more than once
    (FORWARD, POST_BACKWARD),  # a list of which a member ran apart
}
SHARDED_STEPS = {
    (SHARDED, UNSHARDED),
    (UNSHARDED, SHARDED),
    (UNSHARDED, SHARDED_POST_FORWARD),
    (SHARDED_POST_FORWARD, UNSHARDED),
    (SHARDED_POST_FORWARD, SHARDED),
}


class Steps:
    """The changes of state that were seen, by who changed."""

    def __init__(self) -> None:
        self.unit: set[tuple[Any, Any]] = set()
        self.group: set[tuple[Any, Any]] = set()
        self.sharded: set[tuple[Any, Any]] = set()
        self.is_lent = False

    def note(self, owner: object, before: object, after: object) -> None:
        if before is after or self.is_lent:
            return
        kind = self.sharded if isinstance(after, ShardedState) else self.unit if isinstance(owner, Unit) else self.group
        kind.add((before, after))


@pytest.fixture(autouse=True)
def _rank(reference: ref.NumpyBackend) -> Iterator[None]:
    with ref.DryWorld(4).rank():
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    prefetch_it = prefetch.prefetch

    def set_and_note(self: Any, name: str, value: object) -> None:
        if isinstance(value, TrainingState | ShardedState) and hasattr(self, name):
            steps.note(self, getattr(self, name), value)
        object.__setattr__(self, name, value)

    def prefetch_unseen(*args: Any) -> None:
        steps.is_lent = True
        try:
            prefetch_it(*args)
        finally:
            steps.is_lent = False

    monkeypatch.setattr(prefetch, "prefetch", prefetch_unseen)
    for cls in (Unit, ParamGroup):
        monkeypatch.setattr(cls, "__setattr__", set_and_note)
    return steps


# What people do


def plain(reshard_after_forward: bool | int | None) -> Callable[[], None]:
    def run() -> None:
        train(wrap(Net(), reshard_after_forward=reshard_after_forward), batch(), batch(step=1))

    return run


def accumulation() -> None:
    for keep in (False, True):
        model = wrap(Net(), reshard_after_forward=not keep)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(not keep)
        train(model, batch(), batch())
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)
        train(model, batch())


def evaluation() -> None:
    model = wrap(Net())
    with ref.no_grad():
        model(batch())
    train(model, batch())
    train(model.b, batch())


def explicit_prefetch() -> None:
    model = wrap(Net())
    model.a.set_modules_to_forward_prefetch([model.b, model.c])
    model.b.set_modules_to_forward_prefetch([model.a, model.b, model.c])
    model.c.set_modules_to_backward_prefetch([model.b, model.a, model])
    model.b.set_modules_to_backward_prefetch([model.c, model.a])
    train(model, batch(), batch())


class Twice(Net):
    def forward(self, x: ref.Value) -> Any:
        return self.head(self.a(self.b(self.a(x))))


def repeated_modules_and_forwards() -> None:
    for model in (wrap(Twice()), wrap(Stack())):
        outputs = [model(batch(step=step)) for step in range(2)]
        ref.backward(ref.total(ref.add(*outputs)))


class Fork(ref.Module):
    """A unit with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = ref.Linear(4, 4), ref.Linear(4, 4)

    def forward(self, x: ref.Value) -> Any:
        return self.left(x), self.right(x)


class Forked(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.b = Fork()

    def forward(self, x: ref.Value) -> Any:
        left, right = self.b(self.a(x))
        return self.c(ref.add(left, self.c(right)))


def several_outputs() -> None:
    train(wrap(Forked()), batch())


class Recomputed(Stack):
    def forward(self, x: ref.Value) -> Any:
        return ref.checkpoint(lambda h: self.c(self.b(h)), self.a(x))


class RecomputedInside(Stack):
    """The unit of all three is recomputed inside itself."""

    def forward(self, x: ref.Value) -> Any:
        return self.c(ref.checkpoint(lambda h: ref.relu(self.b(self.a(h))), x))


def recomputation() -> None:
    for make in (Recomputed, RecomputedInside):
        train(wrap(make()), batch(), batch())
    model = wrap(Stack())
    for step in range(2):
        ref.backward(ref.total(ref.checkpoint(model, batch(step=step))))


def lists() -> None:
    for members in ("a", "b"), ("c", "head"):
        model = Net()
        hpcompat.fully_shard([getattr(model, name) for name in members])
        wrap(model, *{"a", "b", "c"} - set(members))
        train(model, batch(), batch())


class HeadApart(Stack):
    def forward(self, x: ref.Value) -> Any:
        return self.b(self.a(x))


def lists_in_part() -> None:
    model = HeadApart()
    hpcompat.fully_shard([model.b, model.c])
    wrap(model, "a")
    train(model, batch())
    for _ in range(2):
        hidden = model(batch())
        ref.backward(ref.total(ref.add(model.c(hidden), model.c(hidden))))


def a_loss_by_chunks() -> None:
    model = HeadApart()
    hpcompat.fully_shard([model.b, model.c])
    wrap(model, "a")
    train(model, batch())
    hidden = model(batch())
    chunk = ref.Value(hidden.data, requires_grad=True)
    for _ in range(3):
        train(model.c, chunk)
    ref.backward(hidden, chunk.grad)


def units_by_hand() -> None:
    model = wrap(Stack(), reshard_after_forward=2)
    for module in (model.a, model.b):
        module.unshard(async_op=True).wait()
        module.reshard()
    hidden = model(batch())
    model.b.reshard()
    model.c.unshard()
    ref.backward(ref.total(hidden))


def two_backwards_over_one_forward() -> None:
    model = wrap(Stack())
    loss = ref.total(model(batch()))
    model.set_is_last_backward(False)
    ref.backward(loss)
    model.set_is_last_backward(True)
    ref.backward(loss)


SCENARIOS: dict[str, Callable[[], None]] = {
    "reshard": plain(True),
    "keep": plain(False),
    "reshard to 2": plain(2),
    "default": plain(None),
    **{
        run.__name__.replace("_", " "): run
        for run in (
            accumulation,
            evaluation,
            explicit_prefetch,
            repeated_modules_and_forwards,
            several_outputs,
            recomputation,
            lists,
            lists_in_part,
            a_loss_by_chunks,
            units_by_hand,
            two_backwards_over_one_forward,
        )
    },
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_unit_and_its_groups_never_part(scenario: Callable[[], None]) -> None:
    """A unit that counts as in forward while a group of it is through its backward gives later calls no backward."""
    pairs: set[tuple[TrainingState, TrainingState]] = set()

    def look(name: str, source: Any, *_: object) -> None:
        unit = getattr(source, "unit", source)
        # Before these the unit has changed its state, and its groups are about to.
        if isinstance(unit, Unit) and name not in ("unshard", "prefetch", "gather_issued"):
            pairs.update((unit.training_state, group.training_state) for group in unit.groups)

    with events.observing(look):
        scenario()
    assert (FORWARD, IDLE) in pairs or (FORWARD, FORWARD) in pairs
    assert not pairs & {(FORWARD, POST_BACKWARD), (FORWARD, PRE_BACKWARD), (PRE_BACKWARD, FORWARD)}, pairs


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_step_is_legal(scenario: Callable[[], None], seen: Steps) -> None:
    scenario()
    assert seen.unit <= UNIT_STEPS
    assert seen.group <= GROUP_STEPS
    assert seen.sharded <= SHARDED_STEPS


def test_together_they_take_every_step(seen: Steps) -> None:
    for scenario in SCENARIOS.values():
        scenario()
    assert seen.unit == UNIT_STEPS
    assert seen.group == GROUP_STEPS
    assert seen.sharded == SHARDED_STEPS


def test_the_tables_of_the_core_are_what_happens() -> None:
    assert UNIT_TRANSITIONS == UNIT_STEPS
    assert GROUP_TRANSITIONS == GROUP_STEPS
    assert SHARDED_TRANSITIONS == SHARDED_STEPS


@pytest.mark.parametrize("number", range(0, 45, 3))
def test_after_a_failure_only_the_reset_is_out_of_the_ordinary(number: int, seen: Steps) -> None:
    model = wrap(Net(), reshard_after_forward=2)
    train(model, batch())
    with at_events() as countdown, countdown.at(number), pytest.raises(Fault):
        train(model, batch())
    model.reset_iter_state()
    train(model, batch())
    assert seen.unit <= UNIT_STEPS
    assert seen.group <= GROUP_STEPS | {(PRE_BACKWARD, IDLE)}
    assert seen.sharded <= SHARDED_STEPS
