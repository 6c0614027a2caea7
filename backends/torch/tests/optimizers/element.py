"""A gradient of -1.56e-8 at the first step: whether a bfloat16 weight moves is decided by the roundings (NUM-03)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from behaviour.registry import behaviour
from hpcompat.optim import optimizer_step
from optimizers.cases import local
from parity.worlds import implementation, named_mesh

GRADIENT = -1.56e-8
NUM_WEIGHTS = 8192


def weights() -> Tensor:
    """Of the size of an output projection's."""
    generator = torch.Generator().manual_seed(42)
    return (torch.randn(NUM_WEIGHTS, 1, generator=generator) * 0.02).to(torch.bfloat16)


def stepped(name: str, *, foreach: bool | None, lr: float) -> Tensor:
    """The weights after one AdamW step."""
    head = nn.Linear(1, NUM_WEIGHTS, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(weights())
    implementation(name).fully_shard(head, mesh=named_mesh((dist.get_world_size(),), ("fsdp",)))
    head(torch.full((1, 1), GRADIENT, dtype=torch.bfloat16)).sum().backward()
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.0, foreach=foreach)
    if name == "native":
        optimizer.step()
    else:
        optimizer_step(optimizer)
    assert (local(head.weight.grad) == torch.tensor(GRADIENT, dtype=torch.bfloat16)).all()
    return head.weight.detach().full_tensor()


def in_float32(lr: float) -> Tensor:
    """The same step in float32, then cast."""
    parameter = nn.Parameter(weights().float())
    parameter.grad = torch.full_like(parameter, GRADIENT, dtype=torch.bfloat16).float()
    torch.optim.AdamW([parameter], lr=lr, weight_decay=0.0).step()
    return parameter.detach().to(torch.bfloat16)


@behaviour(
    2, 4, reports=["mindspore-ai/hyper-parallel#700"], each=[{"foreach": choice} for choice in (None, True, False)]
)
def a_tiny_gradient_moves_what_it_moves_in_fsdp2(foreach: bool | None) -> None:
    """Learning rates at which the update is about half the distance to the next bfloat16 number."""
    before, num_apart = weights(), 0
    for lr in (1e-4, 1.0006e-4, 2e-4):
        ours, theirs = stepped("hpcompat", foreach=foreach, lr=lr), stepped("native", foreach=foreach, lr=lr)
        assert torch.equal(ours, theirs)
        stays = theirs == before
        assert 0 < stays.sum() < NUM_WEIGHTS
        assert torch.equal(ours[stays], before[stays])
        num_apart += int((in_float32(lr) != theirs).sum())
    assert num_apart > 0, "a step in float32 moves others"
