"""What the scheduler does, in order, where a unit is more than a module with one group."""

from __future__ import annotations

from typing import Any

import pytest

import hpcompat
from hpcompat_conformance import numpy_reference as ref
from schedules import FORWARD, events_of, expected, step
from training import Stack, batch, train, wrap

pytestmark = pytest.mark.usefixtures("rank")

# Several param groups in one unit (PLC-06, PLC-07)


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
            pre_forward a, unshard a, wait_for_unshard a, unshard a, wait_for_unshard a
            reshard a, reshard a, post_forward a
            pre_forward b, unshard b, wait_for_unshard b, unshard b, wait_for_unshard b
            reshard b, reshard b, post_forward b
            pre_forward c, unshard c, wait_for_unshard c, unshard c, wait_for_unshard c
            reshard c, reshard c, post_forward c
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
        train(model, batch(requires_grad=False))
    # Of each layer the weights (2 rows of 4) and the bias (2 of 4): forward, then backward with the last group first.
    sizes = [(call.name, call.num_sent) for call in rank.calls]
    assert sizes[-2:] == [("reduce_scatter", 4), ("reduce_scatter", 16)], "also in the final callback"
    sizes = sizes[: len(sizes) // 2]
    assert sizes[:6] == [("all_gather", 8), ("all_gather", 2)] * 3
    backward = [
        ("all_gather", 8),
        ("all_gather", 2),
        *[("all_gather", 2), ("all_gather", 8), ("reduce_scatter", 4), ("reduce_scatter", 16)] * 2,
    ]
    assert sizes[6:] == [*backward, ("reduce_scatter", 4), ("reduce_scatter", 16)]


# Recomputation


class Checkpointed(Stack):
    """Recomputes b and c together, so that backward enters the one before the other is due."""

    def forward(self, x: ref.Value) -> ref.Value:
        return ref.checkpoint(lambda h: self.c(self.b(h)), self.a(x))


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


# Module lists (ENT-06, LIF-11)


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
        return self.b(self.a(x))


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
        pre_backward root
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
        pre_backward b+c, post_backward b+c, reshard b+c, reduce b+c
        pre_backward root
        pre_backward b+c, unshard b+c, wait_for_unshard b+c, prefetch a, unshard a
        pre_backward root
        post_backward b+c, reshard b+c, reduce b+c
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )


def test_a_list_that_was_run_without_a_root_can_be_run_with_one() -> None:
    model, fresh = Stack(), Stack()
    for stack in (model, fresh):
        hpcompat.fully_shard([stack.a, stack.b])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="requires a single root module"):
            model.a(batch())
    with hpcompat.record_events() as retried:
        train(wrap(model, "c"), batch())
    with hpcompat.record_events() as clean:
        train(wrap(fresh, "c"), batch())
    assert retried == clean
