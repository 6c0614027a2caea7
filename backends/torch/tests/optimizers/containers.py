"""Optimizers and norms over sharded, replicated, ignored, plain and tensor-parallel parameters, meshes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from behaviour.models import all_ranks, assert_same_bits, whole
from behaviour.registry import behaviour
from hpcompat import fully_shard
from hpcompat.optim import clip_grad_norm_, optimizer_step, zero_grad
from optimizers.cases import ELEMENT_WISE, plain_model
from parity.worlds import named_mesh

WIDTH = 16


def same_batch(step: int) -> tuple[Tensor, Tensor]:
    """On every rank, so that the gradients of ignored parameters are those of the whole."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, 1, generator=generator)


def mixed_model(*, replicated: bool = True) -> nn.Module:
    """Weights sharded, biases ignored in the first layer and replicated in the second."""
    model = plain_model()
    fully_shard(model[0], mesh=all_ranks(), ignored_params={model[0].bias})
    if replicated:
        fully_shard(model[2], mesh=all_ranks(), replicate_params={model[2].bias})
    return fully_shard(model, mesh=all_ranks(), ignored_params={model[0].bias})


def train(model: nn.Module, optimizer: Any, *, ours: bool, limit: float = 0.1) -> list[float]:
    """Five clipped steps; the norms."""
    norms = []
    for step in range(5):
        inputs, targets = same_batch(step)
        ((model(inputs) - targets) ** 2).mean().backward()
        if ours:
            norms.append(clip_grad_norm_(model.parameters(), limit).item())
            optimizer_step(optimizer)
            zero_grad(optimizer)
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


@behaviour(
    1,
    2,
    4,
    reports=["pytorch/pytorch#183207", "cornstarch-org/Cornstarch#87"],
    each=[
        {"name": name, "foreach": choice} for name in ("AdamW", "SGD momentum", "RMSprop") for choice in (None, True)
    ],
)
def mixtures_train_as_one_process(name: str, foreach: bool | None) -> None:
    kind, options = ELEMENT_WISE[name]
    model, truth = mixed_model(), plain_model()
    kinds = {type(parameter) for parameter in model.parameters()}
    assert kinds == {nn.Parameter, DTensor}
    ours = kind(model.parameters(), **options, foreach=foreach)
    theirs = kind(truth.parameters(), **options)
    norms, true_norms = train(model, ours, ours=True), train(truth, theirs, ours=False)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(true_norms), rtol=1e-5, atol=0)
    for (fqn, mine), (_, wanted) in zip(model.named_parameters(), truth.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine), wanted.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, fqn=fqn: f"{fqn}: {text}"
        )


@behaviour(2, reports=["pytorch/pytorch#183207"])
def native_refuses_the_mixture() -> None:
    """If this fails, torch has learnt it."""
    model = mixed_model()
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    inputs, targets = same_batch(0)
    ((model(inputs) - targets) ** 2).mean().backward()
    with pytest.raises((RuntimeError, TypeError, ValueError), match="DTensor"):
        optimizer.step()


def on_two_meshes(dtype: torch.dtype) -> list[nn.Parameter]:
    """On all ranks in a row and in a square, sharded, replicated and both; and a plain one."""
    row, square = named_mesh((4,), ("fsdp",)), named_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(7)
    made = [
        distribute_tensor(torch.randn(7, 4), row, [Shard(0)]),
        distribute_tensor(torch.randn(6, 4), square, [Shard(0), Shard(1)]),
        distribute_tensor(torch.randn(5, 3), square, [Replicate(), Shard(0)]),
        distribute_tensor(torch.randn(3), square, [Replicate(), Replicate()]),
        torch.randn(4, 2),
    ]
    return [nn.Parameter(value.to(dtype)) for value in made]


def copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(whole(parameter).clone()) for parameter in parameters]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """The same global gradient, in the placement of the parameter."""
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad


@behaviour(
    4,
    reports=["pytorch/pytorch#140514", "huggingface/accelerate#3905"],
    each=[{"dtypes": dtypes, "num_groups": num} for dtypes in ("fp32", "bf16", "mixed") for num in (1, 3)],
)
def several_meshes_and_dtypes_in_one_optimizer(dtypes: str, num_groups: int) -> None:
    """Elements update as those of whole plain tensors: to the bit, for nothing is communicated."""
    chosen = {"fp32": [torch.float32], "bf16": [torch.bfloat16], "mixed": [torch.float32, torch.bfloat16]}[dtypes]
    sharded = [parameter for dtype in chosen for parameter in on_two_meshes(dtype)]
    truth = copies(sharded)

    def optimizer_of(parameters: list[nn.Parameter]) -> Any:
        groups = [{"params": parameters[number::num_groups], "lr": 0.1 * (number + 1)} for number in range(num_groups)]
        return optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)

    ours, theirs = optimizer_of(sharded), optimizer_of(truth)
    for step in range(4):
        give_gradients(sharded, step)
        give_gradients(truth, step)
        optimizer_step(ours)
        theirs.step()
    for kind in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(
            {str(number): whole(ours.state[parameter][kind]) for number, parameter in enumerate(sharded)},
            {str(number): theirs.state[parameter][kind] for number, parameter in enumerate(truth)},
        )
    assert_same_bits(
        {str(number): whole(parameter) for number, parameter in enumerate(sharded)},
        {str(number): parameter.detach() for number, parameter in enumerate(truth)},
    )


@behaviour(4)
def partial_gradients_are_added_up() -> None:
    """What autograd leaves on a tensor-parallel parameter that is replicated: a sum still to be made."""
    mesh = named_mesh((4,), ("fsdp",))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()])) for _ in range(2)]
    truth = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    mine = torch.full((3,), float(dist.get_rank() + 1))
    for parameter, plain in zip(parameters, truth, strict=True):
        parameter.grad = DTensor.from_local(mine.clone(), mesh, [Partial()], run_check=False)
        plain.grad = torch.full((3,), 10.0)
    norm = clip_grad_norm_(parameters, 1.0)
    true_norm = torch.nn.utils.clip_grad_norm_(truth, 1.0)
    assert torch.equal(norm, true_norm)
    for values in (parameters, truth):
        optimizer_step(optim.SGD(values, lr=0.5))
    for parameter, plain in zip(parameters, truth, strict=True):
        assert torch.equal(whole(parameter), plain.detach())
        assert parameter.grad.placements == (Replicate(),)
