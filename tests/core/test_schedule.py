"""What the scheduler does, in order: exact event lists (FSDP2 clauses 5.4, 8, 9 and 10)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import hpcompat
from hpcompat_conformance import numpy_reference as ref
from recording_streams import RecordingStreams
from training import Net, Stack, batch, expected, lines, train, wrap

pytestmark = pytest.mark.usefixtures("rank")

FORWARD = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
    pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
    pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
    post_forward root
"""
# Without streams: what follows is known from the forward before.
FORWARD_AHEAD = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, prefetch b, unshard b, reshard a, post_forward a
    pre_forward b, wait_for_unshard b, prefetch c, unshard c, reshard b, post_forward b
    pre_forward c, wait_for_unshard c, reshard c, post_forward c
    post_forward root
"""
BACKWARD = """
    pre_backward c, unshard c, wait_for_unshard c, prefetch b, unshard b
    pre_backward root
    post_backward c, reshard c, reduce c
    pre_backward b, wait_for_unshard b, prefetch a, unshard a
    post_backward b, reshard b, reduce b
    pre_backward a, wait_for_unshard a
    post_backward a, reshard a, reduce a
    final_callback root
"""
FORWARD_KEEPING = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, post_forward a
    pre_forward b, unshard b, wait_for_unshard b, post_forward b
    pre_forward c, unshard c, wait_for_unshard c, post_forward c
    post_forward root
"""
# A prefetch of what is unsharded already gathers nothing.
FORWARD_AHEAD_KEEPING = FORWARD_AHEAD.replace(", reshard a", "").replace(", reshard b", "").replace(", reshard c", "")
BACKWARD_KEEPING = """
    pre_backward c, prefetch b
    pre_backward root
    post_backward c, reshard c, reduce c
    pre_backward b, prefetch a
    post_backward b, reshard b, reduce b
    pre_backward a
    post_backward a, reshard a, reduce a
    final_callback root
"""


def events_of(body: Callable[[], object]) -> list[str]:
    with hpcompat.record_events() as events:
        body()
    return lines(events)


def step(model: Any, *, requires_grad: bool = True) -> list[str]:
    return events_of(lambda: train(model, batch(requires_grad=requires_grad)))


def without(text: str, *names: str) -> list[str]:
    """The events of ``text`` but those called ``names``."""
    return [event for event in expected(text) if event.split()[0] not in names]


# reshard_after_forward


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_resharding_gathers_once_more_for_backward(reshard_after_forward: bool | None) -> None:
    model = wrap(Stack(), reshard_after_forward=reshard_after_forward)
    assert step(model) == expected(FORWARD + BACKWARD)
    assert step(model) == expected(FORWARD_AHEAD + BACKWARD)
    assert step(model) == expected(FORWARD_AHEAD + BACKWARD)


def test_not_resharding_gathers_once() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    assert step(model) == expected(FORWARD_KEEPING + BACKWARD_KEEPING)
    assert step(model) == expected(FORWARD_AHEAD_KEEPING + BACKWARD_KEEPING)


def test_an_int_reshards_to_the_smaller_group() -> None:
    with ref.DryWorld(4).rank() as rank:
        model = wrap(Stack(), reshard_after_forward=2)
        assert step(model) == expected(FORWARD.replace("reshard", "reshard_post_forward") + BACKWARD)
    gathers = [call.num_ranks for call in rank.calls if call.name == "all_gather"]
    assert gathers == [4, 4, 4, 2, 2, 2]


def test_the_root_keeps_its_parameters_by_default() -> None:
    assert step(wrap(Net())) == expected(
        """
        pre_forward root, unshard root, wait_for_unshard root
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
        pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
        post_forward root
        pre_backward root, prefetch c, unshard c
        pre_backward c, wait_for_unshard c, prefetch b, unshard b
        post_backward c, reshard c, reduce c
        pre_backward b, wait_for_unshard b, prefetch a, unshard a
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        post_backward root, reshard root, reduce root
        final_callback root
        """
    )


def test_a_root_told_to_reshard_does() -> None:
    events = step(wrap(Net(), reshard_after_forward=True))
    start = events.index("reshard root")
    assert events[start : start + 6] == expected(
        "reshard root, post_forward root, pre_backward root, unshard root, wait_for_unshard root, prefetch c"
    )


def test_the_setter_ends_the_roots_special_treatment() -> None:
    model = wrap(Net())
    model.set_reshard_after_forward(True)
    events = step(model)
    assert "unshard root" in events[events.index("pre_backward root") :]


# Backward without gradients of the inputs


def test_the_first_layer_reduces_in_the_final_callback_if_the_input_needs_no_gradient() -> None:
    assert step(wrap(Stack()), requires_grad=False)[-6:] == expected(
        "pre_backward a, wait_for_unshard a, final_callback root, post_backward a, reshard a, reduce a"
    )


def test_a_frozen_unit_is_gathered_for_backward_but_not_reduced() -> None:
    model = Stack()
    for _, parameter in model.b.named_parameters():
        parameter.requires_grad = False
    assert step(wrap(model)) == [event for event in expected(FORWARD + BACKWARD) if event != "reduce b"]


def test_a_unit_whose_backward_needs_no_parameters_is_not_gathered_for_it() -> None:
    model = wrap(Stack())
    model.b.set_unshard_in_backward(False)
    events = step(model)
    backward = events[events.index("pre_backward c") :]
    assert "unshard b" not in backward
    assert "prefetch b" in backward
    assert "reduce b" in backward


# Accumulation


def test_without_sync_nothing_is_reduced() -> None:
    model = wrap(Stack())
    model.set_requires_gradient_sync(False)
    assert step(model) == without(FORWARD + BACKWARD, "reduce")
    model.set_requires_gradient_sync(True)
    assert step(model) == expected(FORWARD_AHEAD + BACKWARD)


def test_without_reshard_after_backward_the_next_forward_gathers_nothing() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    assert step(model) == without(FORWARD_KEEPING + BACKWARD_KEEPING, "reduce", "reshard")
    assert step(model) == without(FORWARD_KEEPING + BACKWARD_KEEPING, "reduce", "reshard", "unshard", "wait_for_unshard")
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    assert step(model) == without(FORWARD_KEEPING + BACKWARD_KEEPING, "unshard", "wait_for_unshard")


def test_the_order_of_forwards_is_kept_until_the_last_backward() -> None:
    model = wrap(Stack())
    model.set_is_last_backward(False)
    assert step(model) == expected(FORWARD + BACKWARD)
    model.set_is_last_backward(True)
    # The first layer of the second forward follows the last of the first.
    guessed_wrong = BACKWARD.replace("pre_backward a, wait_for_unshard a", "pre_backward a, wait_for_unshard a, prefetch c, unshard c")
    assert step(model) == expected(FORWARD_AHEAD + guessed_wrong)
    assert step(model) == expected(FORWARD_AHEAD + BACKWARD), "the last backward dropped the gather and the order"


# Prefetching


def test_explicit_forward_prefetch_follows_the_own_wait() -> None:
    model = wrap(Stack())
    model.a.set_modules_to_forward_prefetch([model.b, model.c])
    assert step(model) == expected(
        """
        pre_forward root
        pre_forward a, unshard a, wait_for_unshard a, prefetch b, unshard b, prefetch c, unshard c, reshard a, post_forward a
        pre_forward b, wait_for_unshard b, reshard b, post_forward b
        pre_forward c, wait_for_unshard c, reshard c, post_forward c
        post_forward root
        """
        + BACKWARD
    )


def test_explicit_backward_prefetch_replaces_the_implicit_one_of_that_unit() -> None:
    model = wrap(Stack())
    model.c.set_modules_to_backward_prefetch([model.a, model.b])
    model.b.set_modules_to_backward_prefetch([model.b])
    assert step(model) == expected(
        FORWARD
        + """
        pre_backward c, unshard c, wait_for_unshard c, prefetch a, unshard a, prefetch b, unshard b
        pre_backward root
        post_backward c, reshard c, reduce c
        pre_backward b, wait_for_unshard b, prefetch b
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )


class Detour(Stack):
    """Runs b, but its output leads nowhere."""

    def forward(self, x: ref.Value) -> ref.Value:
        x = self.a(x)
        self.b(x)
        return self.c(x)  # type: ignore[no-any-return]


def test_a_wrong_guess_is_dropped() -> None:
    model = wrap(Detour())
    once = expected(
        FORWARD
        + """
        pre_backward c, unshard c, wait_for_unshard c, prefetch b, unshard b
        pre_backward root
        post_backward c, reshard c, reduce c
        pre_backward a, unshard a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        post_backward b
        """
    )
    assert step(model) == once
    # Gathered again, where the forward before says, for the gather that nobody used is gone.
    assert step(model) == expected(FORWARD_AHEAD) + once[len(expected(FORWARD)) :]


class Switch(Stack):
    """Runs b or c after a, as the caller wants."""

    def forward(self, x: ref.Value, *, use_c: bool = False) -> ref.Value:
        layer = self.c if use_c else self.b
        return layer(self.a(x))  # type: ignore[no-any-return]


def test_a_successor_that_changes_is_not_guessed_again() -> None:
    model = wrap(Switch())
    with ref.no_grad():
        assert "prefetch b" not in events_of(lambda: model(batch()))
        assert "prefetch b" in events_of(lambda: model(batch()))
        wrong = events_of(lambda: model(batch(), use_c=True))
        assert wrong[2:] == expected(
            """
            unshard a, wait_for_unshard a, prefetch b, unshard b, reshard a, post_forward a
            pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
            post_forward root
            """
        )
        for use_c in (False, True, False):
            events = events_of(partial(model, batch(), use_c=use_c))
            assert not [event for event in events if "prefetch" in event]


def test_a_device_with_streams_overlaps_without_gathering_ahead() -> None:
    with ref.registered(ref.NumpyBackend(RecordingStreams())):
        model = wrap(Stack())
        assert step(model) == expected(FORWARD + BACKWARD)
        assert step(model) == expected(FORWARD + BACKWARD)


# Other ways through the modules


class Twice(Stack):
    def forward(self, x: ref.Value) -> ref.Value:
        return self.b(self.a(self.a(x)))  # type: ignore[no-any-return]


def test_a_module_called_twice_is_gathered_and_reduced_twice() -> None:
    assert step(wrap(Twice())) == expected(
        """
        pre_forward root
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
        post_forward root
        pre_backward b, unshard b, wait_for_unshard b, prefetch a, unshard a
        pre_backward root
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a, prefetch a
        post_backward a, reshard a, reduce a
        pre_backward a, unshard a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        post_backward c
        """
    )


def test_several_forwards_before_one_backward_are_undone_last_first() -> None:
    model = wrap(Stack())

    def body() -> None:
        first, second = model(batch()), model(batch(step=1))
        ref.backward(ref.total(ref.add(first, second)))

    backward = BACKWARD.replace("final_callback root", "")
    undo_second = backward.replace("wait_for_unshard a", "wait_for_unshard a, prefetch c, unshard c")
    undo_first = backward.replace("pre_backward c, unshard c,", "pre_backward c,") + "final_callback root"
    assert events_of(body) == expected(FORWARD + FORWARD_AHEAD + undo_second + undo_first)


def test_evaluation_leaves_nothing_to_do() -> None:
    model = wrap(Stack())
    with ref.no_grad():
        assert events_of(lambda: model(batch())) == expected(FORWARD)
        assert events_of(lambda: model(batch())) == expected(FORWARD_AHEAD)


def test_evaluation_keeps_what_is_not_resharded() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    with ref.no_grad():
        assert events_of(lambda: model(batch())) == expected(FORWARD_KEEPING)
        assert events_of(lambda: model(batch())) == without(FORWARD_KEEPING, "unshard", "wait_for_unshard")


def test_a_unit_below_the_root_can_run_alone_after_the_first_step() -> None:
    model = wrap(Stack())
    step(model)
    # c followed b before; not now, so its gather is dropped.
    assert step(model.b) == expected(
        """
        pre_forward b, unshard b, wait_for_unshard b, prefetch c, unshard c, reshard b, post_forward b
        pre_backward b, unshard b, wait_for_unshard b
        post_backward b, reshard b, reduce b
        final_callback root
        post_backward a, post_backward c
        """
    )


# Several param groups in one unit (clause 4)


def test_groups_of_a_unit_go_forward_in_order_and_backward_in_reverse() -> None:
    with ref.DryWorld(4).rank() as rank:
        mesh = ref.init_device_mesh((2, 2), mesh_dim_names=("x", "y"))
        weights, biases = (hpcompat.FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("x", "y"))

        def place(parameter: ref.Parameter) -> hpcompat.ShardPlacementResult:
            return hpcompat.ShardPlacementResult(None, weights if parameter.data.ndim == 2 else biases)

        model = wrap(Stack(), mesh=mesh["x"], shard_placement_fn=place)
        assert step(model) == expected(
            """
            pre_forward root
            pre_forward a, unshard a, wait_for_unshard a, unshard a, wait_for_unshard a, reshard a, reshard a, post_forward a
            pre_forward b, unshard b, wait_for_unshard b, unshard b, wait_for_unshard b, reshard b, reshard b, post_forward b
            pre_forward c, unshard c, wait_for_unshard c, unshard c, wait_for_unshard c, reshard c, reshard c, post_forward c
            post_forward root
            pre_backward c, unshard c, wait_for_unshard c, unshard c, wait_for_unshard c
            prefetch b, unshard b, prefetch b, unshard b
            pre_backward root
            post_backward c, reshard c, reduce c, post_backward c, reshard c, reduce c
            pre_backward b, wait_for_unshard b, wait_for_unshard b, prefetch a, unshard a, prefetch a, unshard a
            post_backward b, reshard b, reduce b, post_backward b, reshard b, reduce b
            pre_backward a, wait_for_unshard a, wait_for_unshard a
            post_backward a, reshard a, reduce a, post_backward a, reshard a, reduce a
            final_callback root
            """
        )
    # Of each layer the weights (2 rows of 4) and the bias (2 of 4): forward, then backward with the last group first.
    sizes = [(call.name, call.num_sent) for call in rank.calls]
    assert sizes[:6] == [("all_gather", 8), ("all_gather", 2)] * 3
    backward = [("all_gather", 8), ("all_gather", 2), *[("all_gather", 2), ("all_gather", 8), ("reduce_scatter", 4), ("reduce_scatter", 16)] * 2]
    assert sizes[6:] == [*backward, ("reduce_scatter", 4), ("reduce_scatter", 16)]


# Recomputation


class Checkpointed(Stack):
    """Recomputes b and c together, so that backward enters the one before the other is due."""

    def forward(self, x: ref.Value) -> ref.Value:
        return ref.checkpoint(lambda h: self.c(self.b(h)), self.a(x))  # type: ignore[no-any-return]


def test_recomputation_neither_reshards_nor_reorders() -> None:
    assert step(wrap(Checkpointed())) == expected(
        FORWARD
        + """
        pre_backward c, unshard c, wait_for_unshard c, prefetch b, unshard b
        pre_backward root
        pre_forward b, wait_for_unshard b, post_forward b, pre_forward c
        post_backward c, reshard c, reduce c
        pre_backward b, prefetch a, unshard a
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )


# Module lists (clause 5.4)


def wrap_list(model: Any, members: list[Any], *others: str) -> Any:
    hpcompat.fully_shard(members)
    return wrap(model, *others)


def test_a_list_is_one_unit() -> None:
    model = Stack()
    assert step(wrap_list(model, [model.a, model.b], "c")) == expected(
        """
        pre_forward root
        pre_forward a+b, unshard a+b, wait_for_unshard a+b
        pre_forward a+b, reshard a+b, post_forward a+b
        pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
        post_forward root
        pre_backward c, unshard c, wait_for_unshard c, prefetch a+b, unshard a+b
        pre_backward root
        post_backward c, reshard c, reduce c
        pre_backward a+b, wait_for_unshard a+b
        post_backward a+b, reshard a+b, reduce a+b
        final_callback root
        """
    )


class HeadApart(Stack):
    """Leaves c to the caller."""

    def forward(self, x: ref.Value) -> ref.Value:
        return self.b(self.a(x))  # type: ignore[no-any-return]


FORWARD_IN_PART = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
    pre_forward b+c, unshard b+c, wait_for_unshard b+c
    post_forward root
    reshard b+c, post_forward b+c
"""


def test_the_root_completes_a_list_that_ran_in_part() -> None:
    model = HeadApart()
    assert step(wrap_list(model, [model.b, model.c], "a")) == expected(
        FORWARD_IN_PART
        + """
        pre_backward root
        pre_backward b+c, unshard b+c, wait_for_unshard b+c, prefetch a, unshard a
        post_backward b+c, reshard b+c, reduce b+c
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )


def test_a_member_called_apart_reduces_apart() -> None:
    model = HeadApart()
    wrap_list(model, [model.b, model.c], "a")
    assert events_of(lambda: ref.backward(ref.total(model.c(model(batch()))))) == expected(
        FORWARD_IN_PART
        + """
        pre_forward b+c, unshard b+c, wait_for_unshard b+c
        post_backward b+c, reshard b+c, reduce b+c
        pre_backward root
        pre_backward b+c, unshard b+c, wait_for_unshard b+c, prefetch a, unshard a
        post_backward b+c, reshard b+c, reduce b+c
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )
