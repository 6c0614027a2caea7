"""Several roots that share what is in flight, as the stages of a pipeline do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcompat_conformance.case import case
from hpcompat_conformance.checks import check_arrays, check_equal, check_raises
from hpcompat_conformance.recipes import Chain
from hpcompat_conformance.run_context import Context

UNITS = ("layers.0", "layers.1", "layers.2")
FIRST, SECOND, BOTH = Chain(sizes=(4, 8, 12)), Chain(sizes=(12, 16)), Chain(sizes=(4, 8, 12, 16))


def shared_roots(ctx: Context, **options: Any) -> tuple[Any, Any]:
    """The layers of one chain in two roots that share their context."""
    first = ctx.shard(ctx.model(FIRST), units=UNITS[:2], **options)
    second = ctx.shard(ctx.model(SECOND), units=UNITS[:1], **options)
    ctx.api.share_comm_ctx([first, second])
    return first, second


@case("COM-15", procs=(2, 4), requires=("share_comm_ctx",), reports=("pytorch/pytorch#154657",))
def collectives_of_two_roots_in_one_backward(ctx: Context) -> None:
    for policy in (True, False):
        one = ctx.shard(ctx.model(BOTH), units=UNITS, reshard_after_forward=policy)
        two = shared_roots(ctx, reshard_after_forward=policy)
        for _ in range(2):
            expected, found = (collectives_of_one_backward(ctx, roots) for roots in ((one,), two))
            check_equal(found, expected, what=f"collectives of two roots with reshard_after_forward={policy}")


def collectives_of_one_backward(ctx: Context, roots: Sequence[Any]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Forward through one root after another, and one backward through all of them."""
    with ctx.record() as log:
        hidden = ctx.inputs(BOTH)
        for root in roots:
            hidden = root(hidden)
        ctx.framework.backward(ctx.framework.loss(hidden))
    return [(event.kind, event.num_elements, event.ranks) for event in log]


def train_in_two(ctx: Context, first: Any, second: Any, inputs: Any, *, says_so: bool) -> None:
    """As pipeline stages do: each root's backward by itself, the later one's first. ``says_so``: that there is another
    one to come."""
    if says_so and isinstance(second, ctx.api.FSDPModule):
        second.set_is_last_backward(False)
    hidden = first(inputs)
    boundary = ctx.framework.tensor(ctx.framework.array(hidden), requires_grad=True)
    gradients: list[Any] = []
    ctx.framework.on_gradient(boundary, gradients.append)
    ctx.framework.backward(ctx.framework.loss(second(boundary)))
    ctx.framework.backward((hidden * ctx.framework.tensor(ctx.framework.array(gradients[0]))).sum())


@case("COM-16", procs=(1, 2, 4), requires=("share_comm_ctx",), reports=("pytorch/pytorch#154657",))
def gradients_of_two_roots_in_one_backward(ctx: Context) -> None:
    check_two_roots(ctx, lambda first, second, x: ctx.framework.backward(ctx.framework.loss(second(first(x)))))


@case("COM-16", procs=(1, 2, 4), requires=("share_comm_ctx",), reports=("pytorch/pytorch#154657",))
def gradients_of_two_roots_one_after_the_other(ctx: Context) -> None:
    check_two_roots(ctx, lambda first, second, x: train_in_two(ctx, first, second, x, says_so=False))


@case("COM-16", procs=(1, 2, 4), requires=("share_comm_ctx",), reports=("pytorch/pytorch#154657",))
def gradients_of_two_roots_that_say_which_backward_is_last(ctx: Context) -> None:
    check_two_roots(ctx, lambda first, second, x: train_in_two(ctx, first, second, x, says_so=True))


def check_two_roots(ctx: Context, train: Any) -> None:
    """Three steps with accumulating gradients against the unsharded roots."""
    truth: list[dict[str, Any]] = [{}, {}]
    plain = ctx.model(FIRST), ctx.model(SECOND)
    for step in range(3):
        for rank in range(ctx.world_size):
            for model in plain:
                ctx.framework.zero_grad(model)
            train(*plain, ctx.inputs(FIRST, step=step, rank=rank))
            for total, model in zip(truth, plain, strict=True):
                for name, gradient in ctx.gradients(model).items():
                    total[name] = total.get(name, 0) + gradient / np.float32(ctx.world_size)
    for policy in (True, False):
        roots = shared_roots(ctx, reshard_after_forward=policy)
        for step in range(3):
            train(*roots, ctx.inputs(FIRST, step=step))
        for root, expected in zip(roots, truth, strict=True):
            check_arrays(ctx.gradients(root), expected, what=f"gradient with reshard_after_forward={policy}")


@case("COM-16", procs=(1,), requires=("share_comm_ctx",))
def joining_nothing_and_strangers(ctx: Context) -> None:
    ctx.api.share_comm_ctx([])
    with check_raises(ValueError, containing="Expects list of FSDPModules"):
        ctx.api.share_comm_ctx([ctx.shard(ctx.model(FIRST)), ctx.model(SECOND)])
