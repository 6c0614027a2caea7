"""Norms and clipping: one value for one model, whatever its layout (NRM-01, NRM-03 to NRM-05)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from behaviour.models import all_ranks, whole
from behaviour.registry import behaviour
from hpcompat import fully_shard, replicate
from hpcompat.optim import clip_grad_norm_
from optimizers.cases import local, plain_model, set_gradients
from optimizers.steps import sharded
from parity.bits import bits
from parity.worlds import named_mesh

ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf)
LIMIT = 0.25
REPORTS = [
    "mindspore-ai/hyper-parallel#279",
    "ByteDance-Seed/VeOmni#184",
    "ByteDance-Seed/VeOmni#471",
    "pytorch/torchtitan#2318",
    "pytorch/pytorch#180501",
]


def fsdp(model: nn.Module) -> nn.Module:
    return units(model, mesh=all_ranks())


def units(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model[::2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def hsdp(rows: int) -> Callable[[nn.Module], nn.Module]:
    def wrap_it(model: nn.Module) -> nn.Module:
        shape = (rows, dist.get_world_size() // rows)
        return units(model, mesh=named_mesh(shape, ("replicate", "shard")))

    return wrap_it


def replicated(model: nn.Module) -> nn.Module:
    ranks = named_mesh((dist.get_world_size(),), ("replicate",))
    for layer in model[::2]:
        replicate(layer, mesh=ranks)
    return replicate(model, mesh=ranks)


def mixed(model: nn.Module) -> nn.Module:
    """Sharded weights, a replicated bias, an ignored one, and a layer that nobody wraps."""
    fully_shard(model[0], mesh=all_ranks(), replicate_params={model[0].bias})
    fully_shard(model[2], mesh=all_ranks(), ignored_params={model[2].bias})
    return model


def two_meshes(model: nn.Module) -> nn.Module:
    fully_shard(model[0], mesh=all_ranks())
    size = dist.get_world_size()
    shape = (2, size // 2) if size > 1 else (1, 1)
    fully_shard(model[2], mesh=named_mesh(shape, ("replicate", "shard")))
    fully_shard(model[4], mesh=all_ranks())
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": lambda model: model,
    "FSDP": fsdp,
    "HSDP 1": hsdp(1),
    "HSDP 2": hsdp(2),
    "HSDP 4": hsdp(4),
    "replicate": replicated,
    "mixed": mixed,
    "two meshes": two_meshes,
}
MATRIX = [
    (1, "single"),
    (1, "FSDP"),
    (2, "FSDP"),
    (4, "FSDP"),
    (2, "HSDP 1"),
    (2, "HSDP 2"),
    (4, "HSDP 1"),
    (4, "HSDP 2"),
]
MATRIX += [
    (4, "HSDP 4"),
    (2, "replicate"),
    (4, "replicate"),
    (2, "mixed"),
    (4, "mixed"),
    (2, "two meshes"),
    (4, "two meshes"),
]


def give(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same global gradients to every layout; returns them in float64."""
    wholes = []
    for number, (_, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        wholes.append(grad.double())
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad
    return wholes


def true_norm(wholes: list[Tensor], order: float) -> float:
    return torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in wholes]), order).item()


def same_everywhere(value: Tensor) -> bool:
    everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value.detach().reshape(1).float())
    return len({bits(found).item() for found in everyone}) == 1


def check_layout(layout: str, order: float) -> None:
    model = LAYOUTS[layout](plain_model())
    wholes = give(model)
    expected = true_norm(wholes, order)
    norm = clip_grad_norm_(model, LIMIT, norm_type=order)
    assert type(norm) is Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert same_everywhere(norm)
    coefficient = min(1.0, LIMIT / (expected + 1e-6))
    for grad, (_, parameter) in zip(wholes, model.named_parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad).double(), grad * coefficient, rtol=1e-5, atol=0)


@behaviour(
    1,
    reports=REPORTS,
    each=[{"layout": name} for size, name in MATRIX if size == 1],
)
def one_rank_has_the_norm_of_the_model(layout: str) -> None:
    for order in ORDERS:
        check_layout(layout, order)


@behaviour(
    2,
    reports=REPORTS,
    each=[{"layout": name} for size, name in MATRIX if size == 2],
)
def two_ranks_have_the_norm_of_the_model(layout: str) -> None:
    for order in ORDERS:
        check_layout(layout, order)


@behaviour(
    4,
    reports=REPORTS,
    each=[{"layout": name} for size, name in MATRIX if size == 4],
)
def four_ranks_have_the_norm_of_the_model(layout: str) -> None:
    for order in ORDERS:
        check_layout(layout, order)


@behaviour(4, each=[{"order": order, "layout": "hsdp"} for order in (2.0, 1.0, 3.0)])
def hsdp_norms_have_the_bits_of_torchs(order: float, layout: str) -> None:
    check_bits(order, layout)


@behaviour(1, 2, 4, each=[{"order": order} for order in (2.0, 1.0, 3.0)])
def norms_have_the_bits_of_torchs(order: float) -> None:
    """For float32 sharded over one axis: `torch.nn.utils.clip_grad_norm_` on native FSDP2, gradients too."""
    check_bits(order, "fsdp")


def check_bits(order: float, layout: str) -> None:
    results = []
    for name, clip in (("hpcompat", clip_grad_norm_), ("native", torch.nn.utils.clip_grad_norm_)):
        model = sharded(name, dtype=torch.float32, layout=layout)
        for step in range(5):
            set_gradients(model.parameters(), step=step)
            norm = clip(model.parameters(), 0.1, norm_type=order)
            results.append([name, whole(norm), *(local(parameter.grad) for parameter in model.parameters())])
    half = len(results) // 2
    for mine, other in zip(results[:half], results[half:], strict=True):
        assert mine[1].item() > 0.1
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(mine[1:], other[1:], strict=True))


@behaviour(
    2,
    reports=["mindspore-ai/hyper-parallel#446", "ByteDance-Seed/VeOmni#862"],
    each=[{"dtype": dtype} for dtype in (torch.bfloat16, torch.float16)],
)
def low_precision_is_added_up_in_float32(dtype: torch.dtype) -> None:
    linear = fully_shard(nn.Linear(300, 400, dtype=dtype), mesh=all_ranks())
    wholes = give(linear, dtype)
    norm = clip_grad_norm_(linear.parameters(), 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(true_norm(wholes, 2.0), rel=1e-5)
    assert abs(norm.to(dtype).item() - true_norm(wholes, 2.0)) > 1e-4, "rounding would have been seen"


@behaviour(2)
def float64_stays() -> None:
    model = units(plain_model().double(), mesh=all_ranks())
    wholes = give(model, torch.float64)
    norm = clip_grad_norm_(model, 1.0)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(true_norm(wholes, 2.0), rel=1e-14)


@behaviour(4, reports=["mindspore-ai/hyper-parallel#279"])
def tensor_parallel_parameters_count_once() -> None:
    """Sharded on both axes, on one of two, strided on one dim, or whole."""
    square = named_mesh((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4), nn.LayerNorm(4))
    for layer, placement in ((model[0], Shard(0)), (model[1], Shard(1))):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), square["tp"], [placement]))
    for parameter, owner, name in ((model[1].bias, model[1], "bias"), (model[2].weight, model[2], "weight")):
        setattr(owner, name, nn.Parameter(distribute_tensor(parameter.detach(), square["tp"], [Replicate()])))
    fully_shard(model[0], mesh=square["dp"])
    fully_shard(model[1], mesh=square["dp"])
    for order in ORDERS:
        wholes = give(model)
        norm = clip_grad_norm_(model.parameters(), LIMIT, norm_type=order)
        assert norm.item() == pytest.approx(true_norm(wholes, order), rel=1e-6)
        assert same_everywhere(norm)


@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """The sizes of what is all-reduced."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tensor.numel())
            return original(tensor, *args, **kwargs)

        patch.setattr(dist, "all_reduce", counted)
        yield seen


@behaviour(
    2,
    4,
    each=[
        {"layout": "FSDP", "num": 1},
        {"layout": "HSDP 2", "num": 1},
        {"layout": "replicate", "num": 0},
        {"layout": "mixed", "num": 2},
        {"layout": "two meshes", "num": 2},
    ],
)
def collectives_are_few(layout: str, num: int) -> None:
    """One per axis on which something is sharded; one more to agree on plain parameters."""
    model = LAYOUTS[layout](plain_model())
    give(model)
    with all_reduces() as seen:
        clip_grad_norm_(model, LIMIT)
    if dist.get_world_size() == 2 and layout in ("HSDP 2", "two meshes"):
        num -= 1  # an axis of one rank
    assert len(seen) == num, seen
    assert sum(seen) <= 3 * len(list(model.parameters())), "numbers, not gradients"
