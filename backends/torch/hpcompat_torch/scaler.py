"""``torch.amp.GradScaler`` over distributed, plain and mixed gradients: all ranks unscale, skip and rescale alike.

Torch's own ``unscale_`` refuses a mixture of plain tensors and DTensors, and looks for infinities on the mesh of the
first gradient only. Here it runs on local gradients, and what it found is made known along every axis of every mesh of
the optimizer's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import Optimizer

from hpcompat_torch.axes import all_axes
from hpcompat_torch.local import settled_gradient


def unscale_grads_(optimizer: Optimizer, scaler: GradScaler) -> None:
    """``scaler.unscale_(optimizer)``, in place of it.

    Raises:
        RuntimeError: called twice in one iteration.
        ValueError: gradients in float16.
    """
    _check(scaler)
    if not scaler.is_enabled():
        return
    with _local_gradients(optimizer):
        scaler.unscale_(optimizer)
    _agree(optimizer, scaler)


def step_if_finite(optimizer: Optimizer, scaler: GradScaler, *, step: Callable[..., Any]) -> Any:
    """``scaler.step(optimizer)`` with ``step(optimizer)`` for what it calls ``optimizer.step()``."""
    _check(scaler)
    if scaler.is_enabled():
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            unscale_grads_(optimizer, scaler)
        else:
            _agree(optimizer, scaler)  # torch's unscale_ may have run
    with _replaced_step(optimizer, step):
        return scaler.step(optimizer)


def _check(scaler: object) -> None:
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"expected scaler to be a torch.amp.GradScaler, but got {scaler!r}")


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def _local_gradients(optimizer: Optimizer) -> Iterator[None]:
    """``optimizer`` with one group of plain tensors that have the local gradients."""
    groups, holders = optimizer.param_groups, []
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            grad = settled_gradient(parameter)
            if grad is not None:
                holder = grad.detach()
                holder.grad = grad
                holders.append(holder)
    optimizer.param_groups = [{"params": holders}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


@torch.no_grad()
def _agree(optimizer: Optimizer, scaler: GradScaler) -> None:
    """Make what the ranks found one finding, on ranks without any gradient too."""
    axes = all_axes(_parameters(optimizer))
    if not axes:
        return
    found: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    home = torch.device("cpu") if scaler._scale is None else scaler._scale.device
    flag = torch.zeros((), device=home)
    for value in found.values():
        flag = torch.maximum(flag, value.to(home))
    for axis in axes:
        flag = flag.to(axis.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=axis.group)
    for device in found or (home,):
        found[device] = flag.to(device)


@contextmanager
def _replaced_step(optimizer: Any, step: Callable[..., Any]) -> Iterator[None]:
    own = vars(optimizer).get("step")  # a scheduler's, around that of the class

    def restore() -> None:
        vars(optimizer).pop("step", None)
        if own is not None:
            optimizer.step = own

    def run(*args: Any, **kwargs: Any) -> Any:
        restore()
        return step(optimizer, *args, **kwargs)

    optimizer.step = run
    try:
        yield
    finally:
        restore()
