"""A decoder in bfloat16, 50 steps on both sides: every loss, gradient, parameter and state; and what must differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from behaviour.registry import behaviour
from hpcompat.optim import clip_grad_norm_, optimizer_step
from optimizers.cases import local
from parity.bits import bits
from parity.decoder import Decoder, DecoderConfig
from parity.worlds import implementation, named_mesh

CONFIG = DecoderConfig(tied=True)
NUM_STEPS = 50
STATES = ("exp_avg", "exp_avg_sq")

Step = Callable[[torch.optim.Optimizer], Any]
Record = dict[tuple[int, str, str], Tensor]


def native_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def float32_step(optimizer: torch.optim.Optimizer) -> None:
    """AdamW in float32 on copies, then a cast: more exact, and wrong."""
    (group,) = optimizer.param_groups
    for parameter in group["params"]:
        state = optimizer.state[parameter]
        if not state:
            state.update({key: torch.zeros_like(parameter) for key in STATES}, step=torch.tensor(0.0))
        wide = nn.Parameter(local(parameter).float())
        wide.grad = local(parameter.grad).float()
        full = torch.optim.AdamW([wide], lr=group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])
        full.state[wide] = {"step": state["step"], **{key: local(state[key]).float() for key in STATES}}
        full.step()
        local(parameter).copy_(wide)
        for key in STATES:
            local(state[key]).copy_(full.state[wide][key])


def wrapped(name: str) -> nn.Module:
    torch.manual_seed(42)
    model, fully_shard = Decoder(CONFIG).to(torch.bfloat16), implementation(name).fully_shard
    mesh = named_mesh((dist.get_world_size(),), ("fsdp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(CONFIG.vocab, (2, CONFIG.length + 1), generator=generator)


def run(name: str, step: Step, *, clip: float | None = None, **options: Any) -> tuple[list[str], Record]:
    """Losses as text, and everything at every phase."""
    model = wrapped(name)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})
    losses: list[str] = []
    record: Record = {}

    def keep(phase: str, values: dict[str, Tensor | None]) -> None:
        record.update({(number, phase, fqn): local(v).clone() for fqn, v in values.items() if v is not None})

    for number in range(NUM_STEPS):
        tokens = batch(number)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(repr(loss.item()))
        loss.backward()
        named = dict(model.named_parameters())
        keep("after_backward", {fqn: parameter.grad for fqn, parameter in named.items()})
        if clip is not None:
            keep("after_clip", {"norm": clip_grad_norm_(model, clip)})
            keep("after_clip", {fqn: parameter.grad for fqn, parameter in named.items()})
        keep("before_optim", named)
        step(optimizer)
        keep("after_optim", named)
        for key in STATES:
            keep(f"after_optim {key}", {fqn: optimizer.state[parameter][key] for fqn, parameter in named.items()})
        optimizer.zero_grad()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return losses, record


def num_differing(mine: Record, other: Record) -> int:
    assert mine.keys() == other.keys()
    return sum(int((bits(mine[key]) != bits(other[key])).sum()) for key in other)


BETAS = [(0.9, 0.999), (0.9, 0.95)]


@behaviour(
    2,
    4,
    reports=["mindspore-ai/hyper-parallel#700", "pytorch/torchtitan#724"],
    each=[{"betas": betas, "foreach": choice} for betas in BETAS for choice in (None, True)],
    strength=2,
)
def fifty_steps_are_native_fsdp2s(betas: tuple[float, float], foreach: bool | None) -> None:
    ours = run("hpcompat", optimizer_step, betas=betas, foreach=foreach)
    theirs = run("native", native_step, betas=betas, foreach=foreach)
    assert len(set(theirs[0])) > NUM_STEPS // 2
    assert [mine == other for mine, other in zip(ours[0], theirs[0], strict=True)].count(False) == 0
    assert num_differing(ours[1], theirs[1]) == 0


@behaviour(2)
def fifty_clipped_steps_are_native_fsdp2s() -> None:
    """Our clipping takes native's DTensors too."""
    ours = run("hpcompat", optimizer_step, clip=0.5)
    theirs = run("native", native_step, clip=0.5)
    norms = [value.item() for (_, phase, name), value in theirs[1].items() if (phase, name) == ("after_clip", "norm")]
    assert len(norms) == NUM_STEPS
    assert max(norms) > 0.5
    assert ours[0] == theirs[0]
    assert num_differing(ours[1], theirs[1]) == 0


@behaviour(2, reports=["mindspore-ai/hyper-parallel#700"])
def other_arithmetic_is_seen() -> None:
    """The comparison sees fused kernels, float32 in between, and one more rounding."""
    losses, record = run("native", native_step)
    fused = run("hpcompat", optimizer_step, fused=True)
    rounded = run("hpcompat", float32_step)
    for other in (fused, rounded):
        assert other[0] != losses
        assert num_differing(other[1], record) > 0
