"""Optimizers: for now, a guard against the silent mistake of stepping over parameters that sharding has replaced."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hpcompat_torch.param import REPLACED

# Number of parameters that an optimizer had when it was checked; param groups may be added later.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_is_watching = False


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
        if isinstance(parameter, torch.Tensor) and (name := getattr(parameter, REPLACED, None))
    ]
    if stale:
        raise ValueError(
            f"expected {type(optimizer).__name__} to hold sharded parameters, but got {len(stale)} that fully_shard "
            f"has replaced ({', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}): the step would train nothing. "
            "Create the optimizer after wrapping, while the parameters are sharded (reshard() brings them back)"
        )
    _checked[optimizer] = num_parameters
