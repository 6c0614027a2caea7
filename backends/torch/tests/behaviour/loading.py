"""Loading values of every form, and building on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hpcompat
from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    gradients,
    integers,
    loss_of,
    mlp,
    parameters,
    shard,
    train,
    true_gradients,
    wrap,
)
from behaviour.registry import behaviour


def other_values() -> dict[str, Tensor]:
    """Global values that are not those of `mlp`."""
    state = mlp().state_dict()
    return {name: integers(value.shape, seed=7) + index for index, (name, value) in enumerate(state.items())}


def holding(values: dict[str, Tensor]) -> nn.Module:
    """The unsharded model with these values."""
    model = mlp()
    model.load_state_dict(values)
    return model


def as_dtensors(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in wrap(holding(values)).state_dict().items()}


def as_locals(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to_local() for name, value in as_dtensors(values).items()}  # type: ignore[attr-defined]


def mixed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One parameter of each form, in turn."""
    forms = [as_dtensors(values), dict(values)]
    return {name: forms[index % 2][name] for index, name in enumerate(values)}


FORMS = {"dtensor": as_dtensors, "global": dict, "mixed": mixed}


@behaviour(
    1,
    2,
    4,
    reports=["pytorch/pytorch#136228"],
    each=[{"form": form, "assign": assign} for form in FORMS for assign in (False, True)],
    strength=2,
)
def values_of_every_form_load(form: str, assign: bool) -> None:
    """Rows of 7, 5, 3 and 1; before and after the first step. Then training goes on from them."""
    values = other_values()
    model = wrap(mlp())
    for when in ("before the first step", "after it"):
        result = model.load_state_dict(FORMS[form](values), assign=assign)
        assert not result.missing_keys, when
        assert not result.unexpected_keys, when
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), when
        assert_same_bits(parameters(model), values)
        model.zero_grad()
        loss_of(model, batch()).backward()
        assert_same_bits(gradients(model), true_gradients(holding(values)))
    # Before training: an assigned value is the parameter itself.
    reference = wrap(holding(values))
    for trained in (model, reference):
        train(trained, steps=[1, 2])
    assert_same_bits(parameters(model), parameters(reference))


def partly_wrapped() -> nn.Module:
    """The first layer is a unit, the root is not."""
    model = mlp()
    shard(model[0])
    return model


@behaviour(2, 4, each=[{"assign": False}, {"assign": True}])
def parts_of_one_rank_are_refused(assign: bool) -> None:
    """A file that holds rank 0's part would give every rank the same rows. Nothing is loaded."""
    model = wrap(mlp())
    before = parameters(model)
    message = r"(?s)in loading state_dict for FSDPSequential:\n\tsize mismatch for 0\.weight: .*load_local_state_dict"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(as_locals(other_values()), assign=assign)
    assert_same_bits(parameters(model), before)
    plain = partly_wrapped()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        plain.load_state_dict({**other_values(), **wholly(plain[0], prefix="0.")}, assign=assign)


def wholly(module: nn.Module, *, prefix: str) -> dict[str, Tensor]:
    """This rank's parts of what ``module`` holds, as plain tensors."""
    return {prefix + name: value.to_local().clone() for name, value in module.state_dict().items()}


@behaviour(1, 2, 4)
def parts_of_each_rank_load_by_the_call_that_says_so() -> None:
    """On a wrapped root and on one that is not; before the first step and after it."""
    values = other_values()
    model = wrap(mlp())
    for _ in range(2):
        result = hpcompat.load_local_state_dict(model, as_locals(values))
        assert not result.missing_keys
        assert_same_bits(parameters(model), values)
        model.zero_grad()
        loss_of(model, batch()).backward()
        assert_same_bits(gradients(model), true_gradients(holding(values)))
        train(model, steps=[1])
    plain = partly_wrapped()
    before = wholly(plain[0], prefix="0.")
    hpcompat.load_local_state_dict(plain, {**values, **{name: value + 1 for name, value in before.items()}})
    for name, value in wholly(plain[0], prefix="0.").items():
        assert torch.equal(value, before[name] + 1)
    assert torch.equal(plain[2].weight, values["2.weight"])


@behaviour(2, 4)
def the_call_for_parts_takes_no_whole_values() -> None:
    model = wrap(mlp())
    before = parameters(model)
    with pytest.raises(ValueError, match=r"size mismatch for 0\.weight: expected a value of the local shape"):
        hpcompat.load_local_state_dict(model, other_values())
    values = as_locals(other_values())
    with pytest.raises(RuntimeError, match=r'Missing.*"0\.weight"'):
        hpcompat.load_local_state_dict(model, {name: value for name, value in values.items() if name != "0.weight"})
    with pytest.raises(TypeError, match="but got 1"):
        hpcompat.load_local_state_dict(model, 1)  # type: ignore[arg-type]
    model = wrap(mlp())
    result = hpcompat.load_local_state_dict(model, {"0.weight": values["0.weight"]}, strict=False)
    assert "0.bias" in result.missing_keys
    assert_same_bits(parameters(model), {**before, "0.weight": other_values()["0.weight"]})


@behaviour(each=[{"assign": False}, {"assign": True}])
def loading_copies_unless_told_to_assign(assign: bool) -> None:
    """What is loaded stays the caller's: training does not change it. With assign, it becomes the parameter."""
    values = as_dtensors(other_values())
    kept = {name: value.full_tensor() for name, value in values.items()}  # type: ignore[attr-defined]
    model = wrap(mlp())
    before = dict(model.named_parameters())
    model.load_state_dict(values, assign=assign)
    assert all((parameter is before[name]) is not assign for name, parameter in model.named_parameters())
    train(model, steps=[0])
    if not assign:
        assert_same_bits({name: value.full_tensor() for name, value in values.items()}, kept)  # type: ignore[attr-defined]


@behaviour()
def loading_reshards_first() -> None:
    """Also when the root was kept unsharded after forward."""
    model = wrap(mlp(), reshard_after_forward=False)
    with torch.no_grad():
        model(batch())
    values = other_values()
    model.load_state_dict(values)
    with torch.no_grad():
        assert torch.equal(model(batch()), holding(values)(batch()))


@behaviour()
def strict_names_the_keys() -> None:
    model = wrap(mlp())
    values = other_values()
    values["typo"] = values.pop("0.weight")
    with pytest.raises(RuntimeError, match=r'(?s)Missing.*"0\.weight".*Unexpected.*"typo"'):
        model.load_state_dict(values)
    result = model.load_state_dict(values, strict=False)
    assert result.missing_keys == ["0.weight"]
    assert result.unexpected_keys == ["typo"]
    del values["typo"]
    assert_same_bits(parameters(model), {"0.weight": mlp()[0].weight.detach(), **values})


class WithTable(nn.Module):
    """Rows of 7 and 3, and a buffer that no state dict holds, as of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, 3)
        self.register_buffer("table", torch.empty(7), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(7.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.up(inputs) + self.table)


def table_values() -> dict[str, Tensor]:
    state = WithTable().state_dict()
    return {name: integers(value.shape, seed=index) for index, (name, value) in enumerate(state.items())}


def table_truth() -> nn.Module:
    model = WithTable()
    model.load_state_dict(table_values())
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        model = WithTable()
    model = wrap(model)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.table.is_meta
    return model


@behaviour(
    1,
    2,
    4,
    reports=["NovaSky-AI/SkyRL#1709", "mindspore-ai/hyper-parallel#306"],
    each=[{"assign": False}, {"assign": True}],
)
def meta_models_are_materialized(assign: bool) -> None:
    """`to_empty`, then values for parameters and buffers: every rank then trains as if built on the CPU."""
    model = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(table_values(), assign=assign)
    model.reset_buffers()
    assert not any(parameter.to_local().is_meta for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(7.0))
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(table_truth()))


@behaviour(1, 2, 4, reports=["mindspore-ai/hyper-parallel#306"])
def meta_models_can_be_initialized_by_their_own_methods() -> None:
    """`reset_parameters` on DTensors gives every rank a piece of one global tensor."""
    model = on_meta()
    model.to_empty(device="cpu")
    for module in (model.up, model.down):
        nn.init.constant_(module.weight, 2.0)
        nn.init.ones_(module.bias)
    model.reset_buffers()
    truth = WithTable()
    for module in (truth.up, truth.down):
        nn.init.constant_(module.weight, 2.0)
        nn.init.ones_(module.bias)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(truth))


@behaviour(reports=["mindspore-ai/hyper-parallel#306"])
def meta_models_take_assigned_shards() -> None:
    """Without `to_empty`: parameters come with the state dict, buffers are made by hand."""
    model = on_meta()
    model.load_state_dict(table_values(), assign=True)
    model.table = torch.arange(7.0)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(table_truth()))
