"""Frozen and unfrozen parameters, and adapters beside a frozen base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    fill,
    gradients,
    integers,
    loss_of,
    mlp,
    parameters,
    shard,
    sizes_of,
    train,
    true_gradients,
    whole,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy


def freeze(model: nn.Module) -> nn.Module:
    """The weight of the second layer, and the whole third one."""
    for parameter in (model[2].weight, *model[4].parameters()):
        parameter.requires_grad_(False)
    return model


@behaviour(reports=["mindspore-ai/hyper-parallel#436"], each=[{"reshard": True}, {"reshard": False}, {"reshard": None}])
def frozen_parameters_stay_and_may_be_unfrozen(reshard: bool | None) -> None:
    """Frozen in the first steps, trained in the later ones; and frozen again."""
    model = wrap(freeze(mlp()), reshard_after_forward=reshard)
    for is_frozen in (True, False, True):
        truth = mlp()
        if is_frozen:
            freeze(truth)
        for parameter, true in zip(model.parameters(), truth.parameters(), strict=True):
            parameter.requires_grad_(true.requires_grad)
        wanted = true_gradients(truth)
        loss_of(model, batch()).backward()
        assert_same_bits(gradients(model), wanted)
        assert len(wanted) == (5 if is_frozen else 8)
        model.zero_grad()


@behaviour(reports=["mindspore-ai/hyper-parallel#436"])
def frozen_parameters_do_not_change() -> None:
    """Under weight decay too: an optimizer over all parameters skips those without a gradient."""
    model = wrap(freeze(mlp()))
    before = parameters(model)
    train(model, steps=range(2))
    after = parameters(model)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {"2.weight", "4.weight", "4.bias"}


@behaviour(reports=["mindspore-ai/hyper-parallel#436"], each=[{"frozen": 0}, {"frozen": 4}, {"frozen": 6}])
def whole_units_may_be_frozen(frozen: int) -> None:
    """The first, one in the middle, the last: of those behind the first, backward passes through."""
    model, truth = mlp(), mlp()
    for built in (model, truth):
        built[frozen].requires_grad_(False)
    wrap(model, reshard_after_forward=True)
    loss_of(model, batch()).backward()
    wanted = true_gradients(truth)
    assert len(wanted) == 6
    assert_same_bits(gradients(model), wanted)


class Adapted(nn.Module):
    """A frozen bf16 base with a trainable fp32 adapter of rank 2."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(num_inputs, num_outputs, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(num_inputs, 2, bias=False)
        self.up = nn.Linear(2, num_outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs.to(self.base.weight.dtype)).float() + self.up(self.down(inputs))


def adapted() -> nn.Module:
    model = nn.Sequential(Adapted(WIDTH, 7), Adapted(7, 3))
    fill(model)
    return model


@behaviour(1, 2, 4, reports=["hiyouga/LlamaFactory#10157", "huggingface/peft#3578"])
def adapters_train_beside_a_base_of_another_dtype() -> None:
    """In one unit, gathered together; dtypes, sizes and the base itself stay."""
    model = adapted()
    for block in model:
        shard(block, reshard_after_forward=True)
    shard(model)
    base = {name: value for name, value in parameters(model).items() if ".base." in name}
    with torch.no_grad():
        assert torch.equal(model(batch()), adapted()(batch()))
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(adapted()))
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters() if parameter.requires_grad)
    train(model, steps=[1])
    after = parameters(model)
    assert_same_bits({name: after[name] for name in base}, base)
    assert all(value.dtype == torch.bfloat16 for value in base.values())
    assert (model[0].base.in_features, model[0].base.out_features, model[0].base.weight.shape) == (WIDTH, 7, (7, WIDTH))


@behaviour(2, reports=["hiyouga/LlamaFactory#10157"])
def adapters_compute_in_the_policy_dtype() -> None:
    """With `param_dtype` both travel in bf16, and the adapter's gradient comes back in its own fp32."""
    model = adapted()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        shard(block, mp_policy=policy)
    shard(model)
    with sizes_of("all_gather") as gathers:
        model(batch()).sum().backward()
    assert {dtype for _, dtype in gathers} == {torch.bfloat16}
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(isinstance(gradient, DTensor) and gradient.dtype == torch.float32 for gradient in trained)


@behaviour(2, reports=["pytorch/pytorch#91167"], each=[{"reduce_dtype": None}, {"reduce_dtype": torch.bfloat16}])
def reductions_carry_trainable_parameters_only(reduce_dtype: torch.dtype | None) -> None:
    """In padded elements, two ranks: weights of 7 x 4, then only the bias of 5 of the second layer, nothing, 1 x 3."""
    model = wrap(freeze(mlp()), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with sizes_of("reduce_scatter") as reductions:
        loss_of(model, batch()).backward()
    first, second, last = 2 * (4 * WIDTH + 4), 2 * 3, 2 * (3 + 1)
    assert reductions == [(size, reduce_dtype or torch.float32) for size in (last, second, first)]


@behaviour()
def parameters_without_a_gradient_get_none() -> None:
    """Unused in this step: not zeros, so that the optimizer skips them."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

        def forward(self, inputs: Tensor) -> Any:
            return self.used(inputs)

    model = shard(fill(Picks()))
    loss_of(model, batch()).backward()
    assert sorted(gradients(model)) == ["used.bias", "used.weight"]
    model.set_reduce_scatter_unused_params(True)
    model.zero_grad()
    loss_of(model, batch()).backward()
    assert torch.equal(whole(model.unused.weight.grad), torch.zeros(3, WIDTH))
    assert_same_bits(gradients(model) | {}, {**zeros_of(model), **true_gradients(fill(Picks()))})


def zeros_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}


@behaviour(1, 2)
def integer_parameters_are_gathered_too() -> None:
    """Frozen lookup tables of integers, beside floats and under a policy that casts floats."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(7), requires_grad=False)
            self.weight = nn.Parameter(integers((7, WIDTH), seed=3))

        def forward(self, inputs: Tensor) -> Tensor:
            assert self.table.dtype == torch.int64
            return inputs @ self.weight[self.table.flip(0)].t()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(Looks(), mp_policy=policy)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(Looks()))
    assert torch.equal(whole(model.table), torch.arange(7))
