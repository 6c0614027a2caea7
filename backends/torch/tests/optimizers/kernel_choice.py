"""Which of torch's implementations agree on this torch and the CPU: the facts behind the choice of kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from behaviour.registry import behaviour
from hpcompat_torch.kernels import ELEMENT_WISE, SAME_IN_FULL_PRECISION
from optimizers import cases
from optimizers.cases import random_gradient
from parity.bits import bits

NAMES = {kind.__name__: kind for kind in ELEMENT_WISE}
SHAPES = [(64, 33), (1000,), (7,), (0, 4)]


def num_differing(kind: type[Any], options: dict[str, Any], dtype: torch.dtype) -> int:
    """Elements that ten steps with the multi-tensor kernels and with the loop leave different."""
    sides = []
    for foreach in (True, False):
        generator = torch.Generator().manual_seed(5)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        optimizer = kind(parameters, **options, foreach=foreach)
        for step in range(10):
            for number, parameter in enumerate(parameters):
                parameter.grad = random_gradient(parameter, seed=100 * step + number)
            optimizer.step()
        sides.append([p.detach() for p in parameters] + [v for s in optimizer.state.values() for v in s.values()])
    return sum(int((bits(mine) != bits(other)).sum()) for mine, other in zip(*sides, strict=True))


def variants(name: str) -> list[dict[str, Any]]:
    """The options of the cases, each also the other way round."""
    found = [options for kind, options in cases.ELEMENT_WISE.values() if kind is NAMES[name]]
    return [
        {**options, "maximize": maximize, **({} if name == "Rprop" else {"weight_decay": decay})}
        for options in found
        for maximize in (False, True)
        for decay in (0.0, 0.1)
    ]


@behaviour(
    1,
    each=[
        {"name": kind.__name__, "dtype": dtype}
        for kind in SAME_IN_FULL_PRECISION
        for dtype in (torch.float32, torch.float64)
    ],
)
def in_full_precision_both_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    assert [num_differing(NAMES[name], options, dtype) for options in variants(name)] == [0] * len(variants(name))


@behaviour(1, each=[{"name": name} for name in ("NAdam", "RAdam", "ASGD")])
def some_order_their_operations_differently(name: str) -> None:
    """If this fails, torch has changed: they can join the others."""
    assert any(num_differing(NAMES[name], options, torch.float32) for options in variants(name))


@behaviour(1, each=[{"dtype": dtype} for dtype in (torch.bfloat16, torch.float16)])
def in_low_precision_scalars_are_rounded_differently(dtype: torch.dtype) -> None:
    """If this fails, torch has changed: the loop is no longer needed there."""
    assert num_differing(optim.AdamW, {"betas": (0.9, 0.95)}, dtype) > 0
    assert num_differing(optim.SGD, {"lr": 0.1, "momentum": 0.9}, dtype) > 0


@behaviour(1)
def in_bfloat16_the_default_betas_hide_it() -> None:
    assert num_differing(optim.AdamW, {}, torch.bfloat16) == 0
