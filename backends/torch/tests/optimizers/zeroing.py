"""`zero_grad`: every form of a gradient, through the module or the optimizer (OPT-07)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from behaviour.models import (
    all_ranks,
    assert_same_bits,
    batch,
    gradients,
    loss_of,
    mlp,
    true_gradients,
    whole,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy, fully_shard
from hpcompat.optim import zero_grad
from parity.worlds import named_mesh

WAYS = [{"through": through} for through in ("module", "optimizer")]


def clear(model: nn.Module, through: str, **options: Any) -> None:
    zero_grad(model if through == "module" else optim.SGD(model.parameters(), lr=0.1), **options)


@behaviour(each=WAYS)
def gradients_accumulated_without_sync_go(through: str) -> None:
    model = wrap(mlp())
    model.set_requires_gradient_sync(False)
    loss_of(model, batch()).backward()
    clear(model, through)
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour(each=WAYS)
def gradients_accumulated_in_another_dtype_go(through: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap(mlp(), mp_policy=policy)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        loss_of(model, batch()).backward()
    clear(model, through)
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour(4, each=WAYS)
def partial_sums_go(through: str) -> None:
    """Under HSDP, reduce-scattered and not yet all-reduced."""
    model = wrap(mlp(), mesh=named_mesh((2, 2), ("replicate", "shard")))
    model.set_requires_all_reduce(False)
    loss_of(model, batch()).backward()
    clear(model, through)
    model.set_requires_all_reduce(True)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour(each=[{**way, "set_to_none": value} for way in WAYS for value in (True, False)])
def main_gradients_go(through: str, set_to_none: bool) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True
    )
    model = wrap(mlp(), mp_policy=policy)
    loss_of(model, batch()).backward()
    clear(model, through, set_to_none=set_to_none)
    for parameter in model.parameters():
        assert (parameter.main_grad is None) == set_to_none
        assert set_to_none or not whole(parameter.main_grad).any()
    loss_of(model, batch(step=1)).backward()
    assert_same_bits({name: whole(p.main_grad) for name, p in model.named_parameters()}, true_gradients(mlp(), step=1))


@behaviour(each=[{**way, "set_to_none": value} for way in WAYS for value in (True, False)])
def gradients_go(through: str, set_to_none: bool) -> None:
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    clear(model, through, set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is (None if set_to_none else kept[parameter])
        assert set_to_none or not whole(parameter.grad).any()


@behaviour(each=[{"call": call} for call in ("ours", "method")])
def gradients_of_shards_go_while_their_module_is_unsharded(call: str) -> None:
    """After an evaluation the root shows whole parameters; the gradients are on the shards."""
    model = fully_shard(mlp(), mesh=all_ranks())
    loss_of(model, batch()).backward()
    with torch.no_grad():
        model(batch())
    (zero_grad if call == "ours" else type(model).zero_grad)(model)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour(1, 2)
def plain_roots_and_optimizers_over_mixtures_are_cleared() -> None:
    """A root that nobody wrapped, an ignored parameter; `foreach=True`, with which torch zeroes in bulk."""
    for set_to_none in (True, False):
        model = mlp()
        fully_shard(model[0], mesh=all_ranks(), ignored_params={model[0].bias})
        for through in ("module", "optimizer"):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            target = model if through == "module" else optim.AdamW(model.parameters(), foreach=True)
            zero_grad(target, set_to_none=set_to_none)
            for parameter in model.parameters():
                assert (parameter.grad is None) == set_to_none
                assert set_to_none or not whole(parameter.grad).any()


@behaviour(1)
def only_the_optimizers_own_parameters_are_cleared() -> None:
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    first, second, *_ = model.parameters()
    zero_grad(optim.SGD([first], lr=0.1))
    assert first.grad is None
    assert second.grad is not None


@behaviour(1)
def other_things_are_refused() -> None:
    for value in (torch.ones(2), nn.Parameter(torch.ones(2))):
        with pytest.raises(TypeError, match="zero_grad expects a module or an optimizer"):
            zero_grad(value)
    with pytest.raises(TypeError, match="expected an object of an installed backend's framework"):
        zero_grad([1])
