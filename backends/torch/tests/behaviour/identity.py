"""What a wrapped module is, what it is not, and how to copy it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import hpcompat
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
    train,
    true_gradients,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import FSDPModule, HSDPModule, UserError


class Head(nn.Linear):
    """A class of the user."""


@behaviour(reports=["pytorch/pytorch#176225"])
def identity_is_not_copied_or_saved() -> None:
    """Copies and files of a module whose parameters were looked at are modules of their own."""
    seen = mlp()
    names = [name for name, _ in hpcompat.named_parameters(seen)]
    file = io.BytesIO()
    torch.save(seen, file)
    loaded = [torch.load(io.BytesIO(file.getvalue()), weights_only=False) for _ in range(2)]
    for several in (loaded, [copy.deepcopy(seen) for _ in range(2)]):
        together = nn.ModuleList([seen, *several])
        assert len(list(hpcompat.parameters(together))) == 3 * len(names)
        assert all(not vars(parameter) for parameter in together.parameters())
        for model in several:
            wrap(model)
            loss_of(model, batch()).backward()
            assert_same_bits(gradients(model), true_gradients(mlp()))
    state = wrap(mlp()).state_dict()
    assert all(not vars(value) for value in state.values())


@behaviour(reports=["NVIDIA/Megatron-LM#7228"])
def a_weight_of_two_roots_is_refused() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    shard(first)
    with pytest.raises(ValueError, match=r"'Linear.weight' is shared .*another FSDP group.*'FSDPLinear.weight' too"):
        shard(second)
    del first
    shard(second)  # the other root is gone


@behaviour(reports=["pytorch/pytorch#183702"])
def a_module_of_two_parents_is_wrapped_before_them() -> None:
    class Predictor(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(WIDTH, WIDTH), head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mix(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 3)
            self.predictor = Predictor(self.head)
            fill(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) + self.predictor(x)

    model = Model()
    shard(model.predictor)
    with pytest.raises(ValueError, match="or wrap a module that two others hold by itself, before them"):
        shard(model)
    model = Model()
    for module in (model.head, model.predictor, model):
        shard(module)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(Model()))


@behaviour()
def class_is_named_after_the_original() -> None:
    first, second, plain = Head(WIDTH, 2), Head(WIDTH, 2), Head(WIDTH, 2)
    assert shard(first) is first
    shard(second)
    assert type(first).__name__ == "FSDPHead"
    assert type(first) is type(second)
    assert isinstance(first, HSDPModule)
    assert isinstance(first, FSDPModule)
    assert isinstance(first, Head)
    assert type(plain) is Head


@behaviour()
def lists_keep_their_type_and_each_member_is_wrapped() -> None:
    layers = [Head(WIDTH, 2), nn.Linear(WIDTH, 2)]
    assert shard(layers) is layers
    assert [type(layer).__name__ for layer in layers] == ["FSDPHead", "FSDPLinear"]


@behaviour()
def slices_of_a_wrapped_sequential_are_plain() -> None:
    """But hold the wrapped layers, which go on gathering for themselves."""
    model = wrap(mlp())
    start = model[:2]
    assert type(start) is nn.Sequential
    assert not isinstance(start, HSDPModule)
    assert type(start[0]).__name__ == "FSDPLinear"
    assert type(model) is not nn.Sequential
    assert torch.equal(start(batch()), mlp()[:2](batch()))


@behaviour()
def new_instances_of_the_class_are_plain() -> None:
    module = shard(Head(WIDTH, 2))
    assert type(type(module)(WIDTH, 3)) is Head


@behaviour()
def deepcopy_is_refused_with_a_recipe() -> None:
    model = wrap(mlp())
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(UserError, match=r"averaged copy \(EMA\), wrap a second model"):
            copied(model)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(mlp()))


@behaviour()
def ema_recipe_gives_the_average() -> None:
    """The advice of the error: a second wrapped model, updated in place."""
    model, average = wrap(mlp()), wrap(mlp())
    wanted = parameters(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        train(model, steps=[step], optimizer=optimizer)
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.25)
        for name, new in parameters(model).items():
            wanted[name].lerp_(new, 0.25)
    assert_same_bits(parameters(average), wanted)
    with torch.no_grad():
        assert torch.equal(average(batch()), unsharded(wanted)(batch()))


def unsharded(values: dict[str, torch.Tensor]) -> nn.Module:
    """The plain model with these parameters."""
    model = mlp()
    model.load_state_dict(values)
    return model


@behaviour()
def a_refused_call_changes_nothing() -> None:
    """So that it can be mended and made again."""
    module = Head(WIDTH, 2)
    module.register_parameter("table", nn.Parameter(torch.ones(2, WIDTH).t()))
    before = dict(module.named_parameters())
    with pytest.raises(NotImplementedError, match="'table'"):
        shard(module)
    assert type(module) is Head
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    module.table = nn.Parameter(module.table.detach().contiguous())
    fill(module)
    shard(module)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    loss_of(module, batch()).backward()
    assert_same_bits(gradients(module), true_gradients(fill(Head(WIDTH, 2))))
