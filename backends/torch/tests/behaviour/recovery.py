"""After exceptions, changes of dtype, evaluation: training goes on with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    gradients,
    loss_of,
    mlp,
    parameters,
    shard,
    train,
    true_gradients,
    whole,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy
from hpcompat.contract.states import TrainingState


class Trap(nn.Module):
    """Raises in forward or in backward while it is set."""

    where: str | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.where == "forward":
            raise ArithmeticError("forward")
        return Raises.apply(inputs) if self.where == "backward" else inputs


class Raises(torch.autograd.Function):
    """Identity with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("backward")


def trapped() -> nn.Sequential:
    """The MLP with a trap in its middle."""
    return nn.Sequential(*mlp()[:4], Trap(), *mlp()[4:])


def units(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]


def prefetch(model: Any) -> None:
    """Gathers are in flight wherever the trap springs."""
    layers = units(model)[1:]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 :])


def fail(model: Any, *, where: str) -> None:
    """One microbatch that goes wrong on every rank."""
    trap = next(module for module in model.modules() if isinstance(module, Trap))
    trap.where = where if where in ("forward", "backward") else None
    with pytest.raises(ArithmeticError, match=where):
        microbatch(model, where=where)
    trap.where = None


def microbatch(model: Any, *, where: str) -> None:
    loss = loss_of(model, batch(step=99))
    if where == "before backward":
        raise ArithmeticError(where)
    loss.backward()
    raise ArithmeticError(where)


def run(*, failures: dict[int, str], accumulate: int, options: dict[str, Any], prefetching: bool) -> dict[str, Tensor]:
    """Three steps; in those named by ``failures`` one microbatch more, which fails, and then the step is made anew."""
    model = wrap(trapped(), **options)
    if prefetching:
        prefetch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if step in failures:
            if accumulate > 1:
                model.set_requires_gradient_sync(False)
                loss_of(model, batch(step=98)).backward()
            fail(model, where=failures[step])
            model.reset_iter_state()
            check_clean(model)
        halve(model)
        optimizer.zero_grad()
        for index in range(accumulate):
            model.set_requires_gradient_sync(index == accumulate - 1)
            loss_of(model, batch(step=10 * step + index)).backward()
        optimizer.step()
    return {**parameters(model), **{f"{name}.grad": value for name, value in gradients(model).items()}}


@torch.no_grad()
def halve(model: Any) -> None:
    """Whatever was gathered before is out of date now."""
    for parameter in model.parameters():
        parameter.mul_(0.5)


def check_clean(model: Any) -> None:
    """Sharded and idle, without an order that prefetching would follow."""
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    root = model._unit()
    assert root.iteration.forward_root is None
    assert not root.comm_ctx.post_forward_order
    for unit in root.iteration.units:
        assert unit.training_state is TrainingState.IDLE
        for group in unit.groups:
            assert group.training_state is TrainingState.IDLE
            assert not group.post_forward_indices


WHERE = ("forward", "backward", "before backward", "after backward")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


@behaviour(
    reports=["pytorch/torchtitan#1329"],
    each=[
        {"where": where, "options": options, "accumulate": accumulate}
        for where in WHERE
        for options, accumulate in [("plain", 1), ("plain", 3), ("kept", 3), ("bf16", 3)]
    ],
    strength=2,
)
def reset_after_an_exception_leaves_no_trace(where: str, options: str, accumulate: int) -> None:
    """In the first step (before which nothing has run) and in a later one."""
    common: dict[str, Any] = {"accumulate": accumulate, "options": OPTIONS[options], "prefetching": False}
    clean = run(failures={}, **common)
    assert_same_bits(run(failures={0: where, 2: where}, **common), clean)


@behaviour(reports=["pytorch/torchtitan#1329"], each=[{"where": where} for where in WHERE])
def reset_drops_gathers_in_flight(where: str) -> None:
    common: dict[str, Any] = {"accumulate": 1, "options": {}, "prefetching": True}
    assert_same_bits(run(failures={0: where, 1: where}, **common), run(failures={}, **common))


@behaviour(2, reports=["pytorch/torchtitan#1329"])
def ranks_may_agree_to_skip_what_failed_on_one() -> None:
    """One rank fails in its loss, after forward; the other has a loss and does not use it. Both reset."""
    model, reference = wrap(trapped()), wrap(trapped())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        if dist.get_rank() == 0:
            fail(model, where="before backward")
        else:
            loss_of(model, batch(step=99))
        model.reset_iter_state()
        check_clean(model)
        train(model, steps=[step], optimizer=optimizer)
    train(reference, steps=range(3))
    assert_same_bits(parameters(model), parameters(reference))


@behaviour(
    4,
    reports=["pytorch/torchtitan#1329"],
    each=[{"where": where, "replicas": replicas} for where in WHERE for replicas in (1, 2)],
)
def reset_drops_slices_and_partial_sums(where: str, replicas: int) -> None:
    """HSDP: a reduce-scattered gradient that waits for its all-reduce, and parameters resharded to two ranks."""
    runs = []
    for fails in (True, False):
        mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
        model = wrap(trapped(), mesh=mesh, reshard_after_forward=2)
        if fails:
            model.set_requires_all_reduce(False)
            loss_of(model, batch(step=98)).backward()
            fail(model, where=where)
            model.reset_iter_state()
            check_clean(model)
            model.set_requires_all_reduce(True)
        train(model, steps=range(2))
        runs.append(parameters(model))
    assert_same_bits(*runs)


@behaviour(reports=["pytorch/torchtitan#1329"])
def reset_before_the_first_forward_is_allowed() -> None:
    """Also with an unshard by hand pending."""
    model = wrap(mlp())
    model.reset_iter_state()
    model[0].unshard(async_op=True)
    model.reset_iter_state()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(mlp()))


@behaviour()
def reset_leaves_sharded_gradients_to_the_user() -> None:
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    model.reset_iter_state()
    assert_same_bits(gradients(model), true_gradients(mlp()))


@behaviour(each=[{"mode": "inference"}, {"mode": "no_grad"}])
def evaluation_before_training_changes_no_bit(mode: str) -> None:
    """As the very first forward, and between steps."""
    model, reference = wrap(mlp()), wrap(mlp())
    context = torch.inference_mode if mode == "inference" else torch.no_grad
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        with context():
            output = model(batch(step=step))
            assert not output.requires_grad
        train(model, steps=[step], optimizer=optimizer)
    train(reference, steps=range(3))
    assert_same_bits(parameters(model), parameters(reference))


@behaviour()
def evaluating_one_unit_alone_changes_no_bit() -> None:
    """Once the root is known, a unit below it may run alone."""
    model, reference = wrap(mlp()), wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        train(model, steps=[step], optimizer=optimizer)
        with torch.no_grad():
            model[0](batch())
    train(reference, steps=range(3))
    assert_same_bits(parameters(model), parameters(reference))


@behaviour()
def forwards_without_a_backward_change_no_bit() -> None:
    """With gradients enabled, as when a loss is only logged."""
    model, reference = wrap(mlp()), wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, batch(step=50 + step))
        train(model, steps=[step], optimizer=optimizer)
    train(reference, steps=range(3))
    assert_same_bits(parameters(model), parameters(reference))


@behaviour(each=[{"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def dtype_may_change_after_a_step(dtype: torch.dtype) -> None:
    """`.to(dtype)` after gathers have been made in the old one; and back."""
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    for changed in (dtype, torch.float32):
        model.zero_grad()
        assert model.to(changed) is model
        assert {parameter.dtype for parameter in model.parameters()} == {changed}
        loss_of(model, batch().to(changed)).backward()
        truth = true_gradients(mlp())
        assert_same_bits(gradients(model), {name: value.to(changed) for name, value in truth.items()})


@behaviour()
def dtype_change_keeps_the_optimizer_valid() -> None:
    """The parameters are the same objects, so a step afterwards moves what is registered."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, batch()).backward()
    optimizer.zero_grad()
    model.double()
    loss_of(model, batch().double()).backward()
    optimizer.step()
    truth = true_gradients(mlp())
    wanted = {name: (value - truth[name]).double() for name, value in mlp().named_parameters()}
    assert_same_bits(parameters(model), wanted)


@behaviour()
def fresh_optimizers_are_not_stale() -> None:
    """The check of stale parameters lets every optimizer pass that was made after wrapping."""
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    half = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": half[:4]}, {"params": half[4:]}], lr=1.0)
    optimizer.step()
    truth = true_gradients(mlp())
    wanted = {name: value.detach() - truth[name] for name, value in mlp().named_parameters()}
    assert_same_bits(parameters(model), wanted)


@behaviour()
def stale_optimizers_are_refused_before_they_change_anything() -> None:
    model = mlp()
    stale = torch.optim.SGD(model.parameters(), lr=1.0)
    wrap(model)
    before = parameters(model)
    loss_of(model, batch()).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="Create the optimizer after wrapping"):
            stale.step()
    assert_same_bits(parameters(model), before)


@behaviour()
def unshard_and_reshard_by_hand() -> None:
    """Between them the registered parameters are whole; a handle may be waited on twice, or never."""
    model = wrap(mlp())
    handle = model[0].unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert torch.equal(whole(model[0].weight), mlp()[0].weight)
    assert not isinstance(model[0].weight, DTensor)
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    assert model[0].unshard() is None
    model[2].unshard(async_op=True)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(mlp()))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@behaviour()
def models_without_a_trainable_parameter_run() -> None:
    """Nothing requires a gradient: forward works, and its output requires none."""
    model = wrap(mlp().requires_grad_(False))
    output = model(batch())
    assert not output.requires_grad
    assert torch.equal(output, mlp()(batch()))


@behaviour()
def evaluation_during_accumulation_changes_no_bit() -> None:
    """Gradients that wait for their reduction survive an evaluation and a state dict."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for evaluates in (True, False):
        model = wrap(mlp(), mp_policy=policy)
        model.set_requires_gradient_sync(False)
        loss_of(model, batch()).backward()
        if evaluates:
            with torch.no_grad():
                model(batch(step=5))
            model.state_dict()
        model.set_requires_gradient_sync(True)
        loss_of(model, batch(step=1)).backward()
        results.append(gradients(model))
    assert_same_bits(*results)


@behaviour()
def backward_may_run_twice_over_one_forward() -> None:
    """With a retained graph: parameters are gathered anew, gradients add up."""
    model = wrap(mlp())
    loss = loss_of(model, batch())
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same_bits(gradients(model), {name: 2 * value for name, value in true_gradients(mlp()).items()})


@behaviour()
def gradients_of_inputs_alone_leave_parameters_without() -> None:
    """`torch.autograd.grad` for an input, then an ordinary step."""
    model, truth = wrap(mlp()), mlp()
    inputs = batch().requires_grad_()
    (got,) = torch.autograd.grad(loss_of(model, inputs), inputs)
    (wanted,) = torch.autograd.grad(loss_of(truth, inputs), inputs)
    assert torch.equal(got, wanted)
    assert not gradients(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(truth))


@behaviour(each=[{"layer": "LSTM"}, {"layer": "GRU"}])
def recurrent_layers_train(layer: str) -> None:
    """They keep a second list of their weights, which must follow every change of registration."""
    torch.manual_seed(0)
    truth = getattr(nn, layer)(WIDTH, 3, num_layers=2)
    model = getattr(nn, layer)(WIDTH, 3, num_layers=2)
    model.load_state_dict(truth.state_dict())
    shard(model, reshard_after_forward=True)

    def loss(module: nn.Module, inputs: Tensor) -> Tensor:
        return module(inputs)[0].sum()

    for _ in range(2):
        model.zero_grad()
        loss(model, batch()).backward()
        torch.testing.assert_close(gradients(model), true_gradients(truth, loss=loss))
