"""Optimizers: constructors, the step on local shards, clipping, zeroing, and a guard against stale parameters."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hpcompat_torch.kernels import is_element_wise
from hpcompat_torch.loan import Loan
from hpcompat_torch.local import distributed_like, is_distributed, local_of
from hpcompat_torch.local import gradient_of as gradient_of
from hpcompat_torch.norm import clip_grad_norm_ as clip_grad_norm_
from hpcompat_torch.param import clear_gradient, replaced_name
from hpcompat_torch.scaler import step_if_finite
from hpcompat_torch.scaler import unscale_grads_ as unscale_grads_

logger = logging.getLogger("hpcompat")

# Number of parameters that an optimizer had when it was checked; param groups may be added later.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_is_watching = False


# Constructors


def AdamW(params: Iterable[Any], **options: Any) -> torch.optim.AdamW:
    """``torch.optim.AdamW`` with the multi-tensor kernels on every device, the CPU included."""
    return torch.optim.AdamW(params, **_with_foreach(options))


def Adam(params: Iterable[Any], **options: Any) -> torch.optim.Adam:
    """``torch.optim.Adam``, likewise."""
    return torch.optim.Adam(params, **_with_foreach(options))


def SGD(params: Iterable[Any], **options: Any) -> torch.optim.SGD:
    """``torch.optim.SGD``, likewise."""
    return torch.optim.SGD(params, **_with_foreach(options))


def _with_foreach(options: dict[str, Any]) -> dict[str, Any]:
    has_choice = options.get("foreach") is not None or options.get("fused") or options.get("differentiable")
    has_tensor = any(isinstance(value, torch.Tensor) for value in options.values()) and not options.get("capturable")
    return options if has_choice or has_tensor else {**options, "foreach": True}


def is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)


# Step


def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """One step with the bits of ``optimizer.step(closure)`` over DTensors, on local tensors where the update allows it.

    [Note: lending] in :mod:`hpcompat_torch.loan`.
    """
    run = optimizer.step if closure is None else functools.partial(optimizer.step, closure)
    if not is_element_wise(optimizer):
        _say_once(type(optimizer), holds_distributed=_holds_distributed(optimizer))
        return run()
    loan = Loan(optimizer)
    after = optimizer.register_step_post_hook(loan.after)
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
    try:
        return run()
    finally:
        after.remove()
        loan.close(keep=False)


def scaled_step(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> Any:
    """``scaler.step(optimizer)`` with :func:`step`: unscale unless that is done, and skip if any rank found an
    infinity.
    """
    return step_if_finite(optimizer, scaler, step=step)


def _holds_distributed(optimizer: Optimizer) -> bool:
    return any(is_distributed(parameter) for group in optimizer.param_groups for parameter in group["params"])


@functools.cache
def _say_once(kind: type[Optimizer], *, holds_distributed: bool) -> None:
    if holds_distributed:
        logger.warning(
            "optimizer_step runs the own step() of %s.%s on distributed tensors: it is differentiable, or not known to "
            "update element by element",
            kind.__module__,
            kind.__qualname__,
        )


def init_state(optimizer: Optimizer) -> None:
    """Make the states that first steps would make, for a checkpoint to be loaded into; no step is taken.

    SGD has none: its momentum is the first gradient.

    Raises:
        NotImplementedError: the optimizer is not one of torch's element-wise ones.
    """
    if not is_element_wise(optimizer):
        raise NotImplementedError(
            f"expected one of torch's element-wise optimizers, but got {type(optimizer).__name__}, whose states only "
            "its step knows; load its state dict after a first step"
        )
    missing = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    if not missing:
        return
    borrowed = [parameter for parameter in missing if gradient_of(parameter) is None]
    loan = Loan(optimizer)
    try:
        for parameter in borrowed:
            zeros = _zeros_like(local_of(parameter))
            parameter.grad = distributed_like(parameter, zeros) if isinstance(parameter, DTensor) else zeros
        _collect_all(optimizer)
        loan.close(keep=True)
    finally:
        loan.close(keep=False)
        for parameter in borrowed:
            parameter.grad = None


def optimizer_state(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """What ``optimizer`` keeps for ``parameter``; empty before its first step."""
    return optimizer.state.get(parameter, {})


def _zeros_like(local: torch.Tensor) -> torch.Tensor:
    """One zero in memory."""
    return local.new_zeros(()).expand(local.shape)


@torch.no_grad()
def _collect_all(optimizer: Any) -> None:
    num_lists = len(inspect.signature(type(optimizer)._init_group).parameters) - 2
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(num_lists)))


# Gradients


@torch.no_grad()
def zero_grad(target: nn.Module | Optimizer, *, set_to_none: bool = True) -> None:
    """Clear the gradients of a module or of an optimizer's parameters, in whatever form they are: on the parameter or
    its shard, ``main_grad``, accumulated unsharded, or partially reduced (OPT-07).
    """
    if isinstance(target, Optimizer):
        members: Iterable[Any] = [parameter for group in target.param_groups for parameter in group["params"]]
    elif isinstance(target, nn.Module):
        members = target.parameters()
    else:
        raise TypeError(f"expected a module or an optimizer, but got {target!r}")
    if set_to_none:
        target.zero_grad()  # a subclass may do more
    for parameter in members:
        clear_gradient(parameter, set_to_none=set_to_none)


# Stale parameters


def watch_for_stale_parameters() -> None:
    """Check every optimizer from now on before its first step, and again when it has got more parameters."""
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_check)
        _is_watching = True


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == num_parameters:
        return
    stale = [
        name
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, torch.Tensor) and (name := replaced_name(parameter))
    ]
    if stale:
        raise ValueError(
            f"expected {type(optimizer).__name__} to hold sharded parameters, but got {len(stale)} that fully_shard "
            f"has replaced ({', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}): the step would train nothing. "
            "Create the optimizer after wrapping, while the parameters are sharded (reshard() brings them back)"
        )
    _checked[optimizer] = num_parameters
