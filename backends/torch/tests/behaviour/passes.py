"""After any backward returns, what it owes is on the shards: lists run in parts, double backward, whole parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from behaviour.models import WIDTH, assert_same_bits, batch, fill, gradients, integers, shard, true_gradients
from behaviour.registry import behaviour


class Trunk(nn.Module):
    """Its forward leaves the head to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


def chunked(model: Trunk, inputs: Tensor) -> list[Tensor]:
    """The whole gradient of the head after the backward of each chunk."""
    hidden = model(inputs)
    apart = hidden.detach().requires_grad_()
    seen = []
    for chunk in apart.chunk(4):
        model.head(chunk).square().sum().backward()
        grad = model.head.weight.grad
        assert grad is not None, "expected a gradient as soon as backward returns"
        seen.append(gradients(model)["head.weight"].clone())
    hidden.backward(apart.grad)
    return seen


def chunks(rank: int) -> Tensor:
    return integers((8, WIDTH), seed=rank)


@behaviour(2, 4, reports=["pytorch/torchtitan#3724"], each=[{"reshard": True}, {"reshard": False}])
def every_chunk_reduces_at_once(reshard: bool) -> None:
    model, plain = Trunk(), Trunk()
    shard(model.body, reshard_after_forward=reshard)
    shard([model.norm, model.head], reshard_after_forward=reshard)
    shard(model)
    for _ in range(2):
        model.zero_grad()
        found = chunked(model, chunks(dist.get_rank()))
        by_rank = []
        for rank in range(dist.get_world_size()):
            plain.zero_grad()
            by_rank.append(chunked(plain, chunks(rank)))
        wanted = [sum(parts) / len(parts) for parts in zip(*by_rank, strict=True)]
        for index, (got, right) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(got, right, msg=lambda text, index=index: f"chunk {index}: {text}")


class Predictor(nn.Module):
    """Calls the head inside its own forward, on something that does not come from its input."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = (head,)  # not a child
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        # After it, so that backward comes to this first.
        self.inner = self.head[0](self.table(torch.arange(4)) * 2)
        return mixed


class Predicting(nn.Module):
    def __init__(self, *, loss_of_inner: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.predictor = Predictor(self.head)
        self.loss_of_inner = loss_of_inner
        fill(self)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        mixed = self.predictor(hidden)
        output = self.head(mixed + hidden)
        assert self.predictor.inner is not None
        return output.sum() + 3 * self.predictor.inner.square().sum() if self.loss_of_inner else output.sum()


@behaviour(
    1, 2, reports=["pytorch/pytorch#183702"],
    each=[{"in_forward": f, "reshard": r} for f in (True, False) for r in (True, False)],
)  # fmt: skip
def members_may_run_inside_members(in_forward: bool, reshard: bool) -> None:
    def loss(model: nn.Module, inputs: Tensor) -> Tensor:
        output = model(inputs)
        return output if in_forward else output + 3 * model.predictor.inner.square().sum()

    model, plain = (Predicting(loss_of_inner=in_forward) for _ in range(2))
    shard([model.predictor, model.head], reshard_after_forward=reshard)
    shard(model.body, reshard_after_forward=reshard)
    shard(model)
    for step in range(2):
        model.zero_grad()
        loss(model, batch(step=step)).backward()
        truth = true_gradients(plain, step=step, loss=loss)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, truth[name], msg=lambda text, name=name: f"{name}: {text}")


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))
    fill(model)
    return model


def penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    x = inputs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().sum()


@behaviour(
    1, 2, reports=["pytorch/pytorch#172543"],
    each=[{"layers": n, "keep": keep} for n in (1, 2) for keep in ("nothing", "after forward", "after backward")],
)  # fmt: skip
def double_backward_gives_the_truth_at_once(layers: int, keep: str) -> None:
    def make() -> nn.Module:
        model = two_layers()
        return model if layers == 2 else nn.Sequential(model[0])

    model, plain = make(), make()
    for layer in model:
        if isinstance(layer, nn.Linear):
            shard(layer, reshard_after_forward=keep != "after forward")
    shard(model)
    if keep == "after backward":
        model.set_reshard_after_backward(False)
    for step in range(2):
        model.zero_grad()
        penalty(model, batch(step=step)).backward()
        truth = true_gradients(plain, step=step, loss=penalty)
        for name, grad in truth.items():
            torch.testing.assert_close(gradient_of(model, name), grad, msg=lambda text, name=name: f"{name}: {text}")
        # And nothing of it is left for the next one.
        model.zero_grad()
        model(batch(step=step)).sum().backward()
        for name, grad in true_gradients(plain, step=step, loss=lambda m, x: m(x).sum()).items():
            assert torch.equal(gradient_of(model, name), grad), name


@behaviour(1, 2, each=[{"way": "forward_ad"}, {"way": "jvp"}])
def forward_mode_goes_through_units(way: str) -> None:
    model, plain = two_layers(), two_layers()
    shard(model[0], reshard_after_forward=False)
    shard(model[2], reshard_after_forward=False)
    shard(model)

    def tangent(module: nn.Module) -> Tensor:
        if way == "jvp":
            return torch.func.jvp(module, (batch(),), (torch.ones_like(batch()),))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(forward_ad.make_dual(batch(), torch.ones_like(batch())))).tangent

    assert torch.equal(tangent(model), tangent(plain))
    model(batch()).sum().backward()
    assert_same_bits(gradients(model), true_gradients(plain, loss=lambda m, x: m(x).sum()))


@behaviour(1, 2, each=[{"way": way} for way in ("unshard", "kept after backward", "kept by the root")])
def whole_parameters_may_be_computed_with(way: str) -> None:
    """A penalty on whole parameters outside of forward: its gradient is there when its backward returns."""
    model: Any = two_layers()
    shard(model[0])
    shard(model)
    inputs = batch(rank=0)  # the same on all ranks: so are the gradients
    if way == "kept after backward":
        model.set_reshard_after_backward(False)
        model(inputs).sum().backward()
    elif way == "kept by the root":
        loss = model(inputs).sum()
    else:
        model.unshard()
    model.zero_grad()
    weight = model[2].weight
    assert not hasattr(weight, "device_mesh"), "expected the whole parameter"
    weight.square().sum().backward()
    wanted = 2 * two_layers()[2].weight.detach()
    assert torch.equal(gradient_of(model, "2.weight"), wanted)
    if way == "kept by the root":
        loss.backward()
        plain = two_layers()
        plain(inputs).sum().backward()
        assert torch.equal(gradient_of(model, "2.weight"), wanted + plain[2].weight.grad)


def gradient_of(model: Any, name: str) -> Tensor:
    """Of the shard, whatever is registered."""
    state = dict(model.state_dict(keep_vars=True))
    grad = state[name].grad
    assert grad is not None, "expected a gradient as soon as backward returns"
    return grad.full_tensor()


@behaviour(1, 2, reports=["pytorch/pytorch#137348"])
def unused_prefetches_end_with_their_forward() -> None:
    class Stopping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            fill(self)

        def forward(self, x: Tensor, *, stop: bool = False) -> Tensor:
            x = self.a(x)
            return x if stop else self.b(x)

    model = Stopping()
    for layer in (model.a, model.b):
        shard(layer)
    shard(model)
    model.a.set_modules_to_forward_prefetch([model.b])
    with torch.no_grad():
        model(batch(), stop=True)
        for parameter in model.parameters():
            parameter.mul_(3)
    plain = Stopping()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(3)
    assert torch.equal(model(batch()), plain(batch()))


@behaviour(1, 2)
def members_that_only_some_passes_run_leave_the_root_alone() -> None:
    """The head alone, without a backward; then the whole model."""
    model, plain = Trunk(), Trunk()
    shard(model.body)
    shard([model.norm, model.head])
    shard(model)
    model(batch())
    with torch.no_grad():
        model.head(batch())
    model.head(batch())
    loss = lambda m, x: m.head(m(x)).sum()  # noqa: E731
    for step in range(2):
        model.zero_grad()
        loss(model, batch(step=step)).backward()
        truth = true_gradients(plain, step=step, loss=loss)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, truth[name], msg=lambda text, name=name: f"{name}: {text}")
