"""`torch.amp.GradScaler` with `optimizer_step`: what one rank finds counts on all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from behaviour.models import all_ranks, batch, loss_of, mlp, wrap
from behaviour.registry import behaviour
from hpcompat import fully_shard
from hpcompat.optim import clip_grad_norm_, optimizer_step, unscale_grads_
from optimizers.cases import assert_equal_optimizers, local, plain_model, set_gradients
from optimizers.containers import mixed_model, same_batch
from optimizers.steps import pair

SCALE = 1024.0


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=SCALE, growth_interval=3)


def scale_gradients(optimizer: Any, *, step: int, factor: float) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    set_gradients(parameters, step=step)
    for parameter in parameters:
        local(parameter.grad).mul_(factor)


def spoil(optimizer: Any, *, rank: int) -> None:
    """An infinity in the gradient of the first parameter, on one rank only."""
    if dist.get_rank() == rank:
        local(optimizer.param_groups[0]["params"][0].grad).view(-1)[0] = math.inf


@behaviour(
    2, 4, reports=["huggingface/accelerate#4289"], each=[{"unscale": how} for how in ("by step", "by us", "by torch")]
)
def scaled_steps_are_native_steps(unscale: str) -> None:
    """Parameters, states and the course of the scale: with an infinity on one rank in the third step of seven."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    scalers = scaler(), scaler()
    scales = []
    for own in scalers:
        own.scale(torch.ones(()))
    for step in range(7):
        for optimizer, own in zip((ours, theirs), scalers, strict=True):
            scale_gradients(optimizer, step=step, factor=own.get_scale())
            if step == 2:
                spoil(optimizer, rank=1)
        if unscale == "by us":
            unscale_grads_(ours, scalers[0])
        elif unscale == "by torch":
            scalers[0].unscale_(ours)
        optimizer_step(ours, scaler=scalers[0])
        scalers[1].step(theirs)
        assert assert_equal_optimizers(ours, theirs) > 0
        for own in scalers:
            own.update()
        scales.append([own.get_scale() for own in scalers])
    assert [mine for mine, _ in scales] == [other for _, other in scales]
    assert [mine for mine, _ in scales] == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE, SCALE]
    steps = {state["step"].item() for state in ours.state.values()}
    assert steps == {6.0}, "the step with the infinity was skipped"
    assert scalers[0].state_dict() == scalers[1].state_dict()


@behaviour(1, 2, 4, reports=["pytorch/pytorch#183207"])
def mixtures_are_scaled_and_clipped() -> None:
    """Sharded, replicated and ignored parameters: as in one process."""
    model, truth = mixed_model(), plain_model()
    optimizers = optim.AdamW(model.parameters(), lr=0.1), optim.AdamW(truth.parameters(), lr=0.1)
    scalers = scaler(), scaler()
    for step in range(4):
        inputs, targets = same_batch(step)
        for net, own in zip((model, truth), scalers, strict=True):
            own.scale(((net(inputs) - targets) ** 2).mean()).backward()
        unscale_grads_(optimizers[0], scalers[0])
        scalers[1].unscale_(optimizers[1])
        norm = clip_grad_norm_(model, 0.1)
        true_norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        torch.testing.assert_close(norm, true_norm, rtol=1e-5, atol=0)
        optimizer_step(optimizers[0], scaler=scalers[0])
        scalers[1].step(optimizers[1])
        for optimizer, own in zip(optimizers, scalers, strict=True):
            own.update()
            optimizer.zero_grad()
    for mine, (name, wanted) in zip(model.parameters(), truth.named_parameters(), strict=True):
        whole = mine.detach().full_tensor() if isinstance(mine, DTensor) else mine.detach()
        torch.testing.assert_close(whole, wanted.detach(), rtol=1e-4, atol=1e-5, msg=name)


@behaviour(2, 4, each=[{"where": where} for where in ("sharded", "ignored")])
def an_infinity_on_one_rank_skips_the_step_on_all(where: str) -> None:
    """Also in the gradient of an ignored parameter, which no other rank has."""
    model = mixed_model()
    parameters = sorted(
        model.parameters(), key=lambda parameter: isinstance(parameter, DTensor) == (where == "ignored")
    )
    assert isinstance(parameters[0], DTensor) == (where == "sharded")
    optimizer, own = optim.SGD(parameters, lr=0.1), scaler()
    own.scale(torch.ones(()))
    before = [local(parameter).clone() for parameter in parameters]
    scale_gradients(optimizer, step=0, factor=SCALE)
    spoil(optimizer, rank=dist.get_world_size() - 1)
    assert optimizer_step(optimizer, scaler=own) is None
    own.update()
    assert own.get_scale() == SCALE / 2
    assert all(torch.equal(local(parameter), value) for parameter, value in zip(parameters, before, strict=True))
    scale_gradients(optimizer, step=1, factor=SCALE)
    optimizer_step(optimizer, scaler=own)
    assert not torch.equal(local(parameters[1]), before[1]) or before[1].numel() == 0


@behaviour(2, reports=["pytorch/pytorch#158719"])
def ranks_without_gradients_take_part() -> None:
    """One rank has no gradient at all: it still learns whether the others step."""
    for spoiled in (False, True):
        model = fully_shard(plain_model(), mesh=all_ranks())
        optimizer, own = optim.SGD(model.parameters(), lr=0.1), scaler()
        own.scale(torch.ones(()))
        if dist.get_rank() == 0:
            scale_gradients(optimizer, step=0, factor=SCALE)
            if spoiled:
                spoil(optimizer, rank=0)
        optimizer_step(optimizer, scaler=own)
        own.update()
        assert own.get_scale() == (SCALE / 2 if spoiled else SCALE)


@behaviour(1, 2)
def scalers_switched_off_do_nothing() -> None:
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    own = GradScaler("cpu", enabled=False)
    for step in range(2):
        for optimizer in (ours, theirs):
            set_gradients(optimizer.param_groups[0]["params"], step=step)
        unscale_grads_(ours, own)
        optimizer_step(ours, scaler=own)
        theirs.step()
    assert assert_equal_optimizers(ours, theirs) > 0


@behaviour(2)
def training_with_a_scaler_learns() -> None:
    """From the loss on, with a scheduler's wrapper around the step: the same as without a scaler, for powers of two."""
    results = []
    for uses_scaler in (False, True):
        model = wrap(mlp())
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        own = GradScaler("cpu", init_scale=8.0, enabled=uses_scaler)
        for step in range(3):
            own.scale(loss_of(model, batch(step=step))).backward()
            optimizer_step(optimizer, scaler=own)
            own.update()
            scheduler.step()
            optimizer.zero_grad()
        assert "step" in vars(optimizer), "the scheduler's wrapper is back"
        results.append(optimizer)
    assert assert_equal_optimizers(results[1], results[0]) > 0


@behaviour(2)
def fused_kernels_skip_by_themselves() -> None:
    for spoiled in (False, True):
        ours, theirs = pair(optim.AdamW, dtype=torch.float32, fused=True)
        scalers = scaler(), scaler()
        for optimizer, own in zip((ours, theirs), scalers, strict=True):
            own.scale(torch.ones(()))
            scale_gradients(optimizer, step=0, factor=SCALE)
            if spoiled:
                spoil(optimizer, rank=0)
        optimizer_step(ours, scaler=scalers[0])
        scalers[1].step(theirs)
        for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            assert torch.equal(local(mine), local(other))
            assert ours.state[mine]["step"] == theirs.state[other]["step"] == (0.0 if spoiled else 1.0)


@behaviour(1)
def misuse_is_told() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, own = optim.SGD([parameter], lr=0.1), scaler()
    own.scale(torch.ones(()))
    parameter.grad = torch.ones(2)
    unscale_grads_(optimizer, own)
    with pytest.raises(RuntimeError, match="unscale_"):
        unscale_grads_(optimizer, own)
    optimizer_step(optimizer, scaler=own)
    with pytest.raises(RuntimeError, match="step"):
        optimizer_step(optimizer, scaler=own)
    assert "step" not in vars(optimizer)
    with pytest.raises(TypeError, match=r"expected scaler to be a torch.amp.GradScaler, but got 5"):
        optimizer_step(optimizer, scaler=5)
    with pytest.raises(ValueError, match="expects closure or scaler, but got both"):
        optimizer_step(optimizer, lambda: None, scaler=own)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ValueError, match="FP16"):
        unscale_grads_(optim.SGD([half], lr=0.1), own)
