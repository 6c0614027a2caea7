"""Rank side: the unsharded run that sharded training must equal, for cases in which native FSDP2 is no reference.

Every rank computes the whole truth by itself: the gradients of all ranks' batches, one after another, on a plain copy
of the model, summed in fp64. Nothing here communicates, so a fault in a collective cannot hide in both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Batches = Callable[[int, int], Any]
Loss = Callable[[nn.Module, Any], Tensor]


class Truth:
    """A plain model trained by SGD with summed gradients divided by `divisor`.

    `dtype` is what a mixed precision policy computes in; parameters stay in their own dtype.
    """

    def __init__(self, module: nn.Module, *, loss: Loss, batches: Batches, divisor: float, dtype: Any = None) -> None:
        self.module = module
        self.loss = loss
        self.batches = batches
        self.divisor = divisor
        self.dtype = dtype

    def gradients(self, steps: Iterable[int], *, ranks: Iterable[int] | None = None) -> dict[str, Tensor]:
        """Summed over `ranks` (all by default) and microbatches `steps`, divided, in fp64, by parameter name.

        Parameters without any gradient are left out.
        """
        total: dict[str, Tensor] = {}
        for rank in range(dist.get_world_size()) if ranks is None else ranks:
            for step in steps:
                working = copy.deepcopy(self.module)
                if self.dtype is not None:
                    working.to(self.dtype)
                self.loss(working, self.cast(self.batches(rank, step))).backward()
                for fqn, parameter in working.named_parameters():
                    if parameter.grad is not None:
                        total[fqn] = total.get(fqn, 0) + parameter.grad.double()
        return {fqn: value / self.divisor for fqn, value in total.items()}

    def cast(self, batch: Any) -> Any:
        """Floating inputs in the compute dtype, the rest as it is; targets stay in fp32."""
        inputs, *rest = batch
        if self.dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return (inputs, *rest)

    def step(self, gradients: dict[str, Tensor], *, rate: float) -> None:
        """parameter -= rate * gradient."""
        with torch.no_grad():
            for fqn, parameter in self.module.named_parameters():
                if fqn in gradients:
                    parameter -= (rate * gradients[fqn]).to(parameter.dtype)


def whole(value: Tensor) -> Tensor:
    """The global value of a DTensor, put together by this rank's row of the mesh; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_near(actual: Tensor, expected: Tensor, *, tolerance: float, what: str) -> None:
    """Largest error below `tolerance` times the largest magnitude expected."""
    assert actual.shape == expected.shape, f"{what}: expected shape {expected.shape}, but got {actual.shape}"
    error = (actual.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1e-12)
    assert error <= tolerance * scale, f"{what}: off by {error:.3e} where values reach {scale:.3e}"


def assert_gradients(module: nn.Module, expected: dict[str, Tensor], *, tolerance: float) -> None:
    """Every parameter has the expected gradient, and those that are not in `expected` have none."""
    for fqn, parameter in module.named_parameters():
        if fqn not in expected:
            assert parameter.grad is None, f"{fqn}: expected no gradient, but got one"
            continue
        assert parameter.grad is not None, f"{fqn}: expected a gradient, but got none"
        assert_near(whole(parameter.grad), expected[fqn], tolerance=tolerance, what=f"gradient of {fqn}")


def assert_parameters(module: nn.Module, plain: nn.Module, *, tolerance: float) -> None:
    expected = dict(plain.named_parameters())
    for fqn, parameter in module.named_parameters():
        near = max(tolerance, torch.finfo(parameter.dtype).eps)
        assert_near(whole(parameter.detach()), expected[fqn].detach(), tolerance=near, what=f"parameter {fqn}")
