"""Which parameters are registered after forward and backward, for each reshard policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    fill,
    gradients,
    loss_of,
    mlp,
    parameters,
    shard,
    true_gradients,
    whole,
    wrap,
)
from behaviour.registry import behaviour

SHARDED, KEPT, SLICED = "sharded", "unsharded", "sharded post forward"

# Policy -> what the root and what the other units are after forward.
AFTER_FORWARD: dict[bool | int | None, tuple[str, str]] = {
    True: (SHARDED, SHARDED),
    False: (KEPT, KEPT),
    None: (KEPT, SHARDED),
}
POLICIES = [{"policy": True}, {"policy": False}, {"policy": None}]


def with_own_parameters() -> nn.Module:
    """An MLP whose root has a parameter of its own."""
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(5)))
    return model


def registered(parameter: nn.Parameter, *, world_size: int) -> str:
    """The state that a registered parameter is in."""
    if not isinstance(parameter, DTensor):
        assert isinstance(parameter, nn.Parameter)
        return KEPT
    if parameter.placements == (Replicate(), Shard(0)) and parameter.device_mesh.shape[1] < world_size:
        return SLICED
    assert parameter.placements == (Shard(0),)
    assert parameter.device_mesh.size() == world_size
    return SHARDED


def states(model: nn.Module) -> tuple[set[str], set[str]]:
    """Of the root's own parameters and of all others."""
    world_size = dist.get_world_size()
    own = {registered(model.scale, world_size=world_size)}
    others = {
        registered(parameter, world_size=world_size) for name, parameter in model.named_parameters() if name != "scale"
    }
    return own, others


def expected(policy: bool | int | None) -> tuple[set[str], set[str]]:
    """Of the root and the others after forward. An int of 1 keeps all, an int of the world's size keeps nothing."""
    world_size = dist.get_world_size()
    if not isinstance(policy, bool) and isinstance(policy, int):
        if 1 < policy < world_size:
            return {SLICED}, {SLICED}
        policy = policy == world_size and world_size > 1
    root, others = AFTER_FORWARD[policy]
    return {root}, {others}


def check_states(policy: bool | int | None) -> None:
    model = wrap(with_own_parameters(), reshard_after_forward=policy)
    assert states(model) == ({SHARDED}, {SHARDED})
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            output = model(batch())
        assert states(model) == expected(policy), f"after forward with {mode.__name__}"
    output.sum().backward()
    assert states(model) == ({SHARDED}, {SHARDED}), "after backward"


@behaviour(reports=["pytorch/pytorch#144289", "pytorch/pytorch#131965", "pytorch/pytorch#154655"], each=POLICIES)
def policy_decides_what_is_registered(policy: bool | None) -> None:
    check_states(policy)


@behaviour(1, 2, 4, reports=["pytorch/pytorch#147179"], each=[{"policy": 1}, {"policy": 2}, {"policy": 4}])
def int_policy_decides_what_is_registered(policy: int) -> None:
    """As far as it divides the world."""
    if dist.get_world_size() % policy == 0:
        check_states(policy)


@behaviour(reports=["pytorch/pytorch#149029"])
def setter_ends_the_special_treatment_of_the_root() -> None:
    model = wrap(with_own_parameters())
    model.set_reshard_after_forward(True)
    model(batch())
    assert states(model) == ({SHARDED}, {SHARDED})
    model.set_reshard_after_forward(False, recurse=False)
    model(batch())
    assert states(model) == ({KEPT}, {SHARDED})


@behaviour(reports=["pytorch/pytorch#144289"])
def reshard_after_backward_off_keeps_parameters() -> None:
    model = wrap(with_own_parameters())
    model.set_reshard_after_backward(False)
    loss_of(model, batch()).backward()
    assert states(model) == ({KEPT}, {KEPT})
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    assert states(model) == ({SHARDED}, {SHARDED})


@behaviour(1, 2, 4, each=[*POLICIES, {"policy": 2}])
def state_dict_is_sharded_whatever_the_policy(policy: bool | int | None) -> None:
    """Keys and order as before wrapping; values are the shards themselves, at any time."""
    if isinstance(policy, int) and not isinstance(policy, bool) and dist.get_world_size() % policy != 0:
        return
    plain = with_own_parameters()
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    model = wrap(with_own_parameters(), reshard_after_forward=policy)
    check_state_dict(model, wanted)
    loss = loss_of(model, batch())
    check_state_dict(model, wanted)
    assert states(model) == ({SHARDED}, {SHARDED})
    loss.backward()
    check_state_dict(model, wanted)
    assert_same_bits(gradients(model), true_gradients(mlp()))


def check_state_dict(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(wanted)
    assert all(isinstance(value, DTensor) for value in state.values())
    assert_same_bits({name: whole(value) for name, value in state.items()}, wanted)
    pairs = zip(state.values(), model.parameters(), strict=True)
    assert all(value.to_local().data_ptr() == parameter.to_local().data_ptr() for value, parameter in pairs)


@behaviour()
def state_dict_follows_training() -> None:
    """A dict taken before a step shows the step: it holds the shards, not copies."""
    model = wrap(mlp())
    state = model.state_dict()
    loss_of(model, batch()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert_same_bits({name: whole(value) for name, value in state.items()}, parameters(model))
    assert not torch.equal(whole(state["0.weight"]), mlp()[0].weight)


class Saving(nn.Linear):
    """Takes a state dict of the whole model in the middle of its forward, and in that of its backward."""

    root: list[nn.Module]
    kept: list[dict[str, Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(dict(self.root[0].state_dict()))
        x = super().forward(x)
        x.register_hook(lambda grad: self.kept.append(dict(self.root[0].state_dict())))
        return super().forward(x)


@behaviour(reports=["pytorch/torchtitan#4753"], each=[{"reshard": True}, {"reshard": False}])
def state_dicts_in_the_middle_disturb_nothing(reshard: bool) -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Saving(WIDTH, WIDTH))
        fill(model)
        model[1].root, model[1].kept = [model], []
        return model

    model, plain = make(), make()
    shard(model[0], reshard_after_forward=reshard)
    shard(model[1], reshard_after_forward=reshard)
    shard(model)
    loss_of(model, batch()).backward()
    assert len(model[1].kept) == 2
    wanted = {name: value.detach() for name, value in plain.state_dict().items()}
    for kept in model[1].kept:
        assert all(isinstance(value, DTensor) and not value.requires_grad for value in kept.values())
        assert_same_bits({name: whole(value) for name, value in kept.items()}, wanted)
    assert_same_bits(gradients(model), true_gradients(plain))


@behaviour(each=[{"way": "load_state_dict"}, {"way": "to"}])
def new_values_in_the_middle_are_refused(way: str) -> None:
    class Loading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if way == "to":
                self.to(torch.float64)
            else:
                self.load_state_dict(self.state_dict())
            return super().forward(x)

    model = shard(nn.Sequential(shard(Loading(WIDTH, WIDTH))))
    with pytest.raises(RuntimeError, match=r"forward and backward, but got it in those of unit '0' .forward."):
        model(batch())
