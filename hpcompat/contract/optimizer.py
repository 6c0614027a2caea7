"""Optimizers on sharded parameters, as :mod:`hpcompat.optim` asks a backend for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Optim(Protocol):
    """What the room ``optim.py`` of each backend gives.

    A backend whose framework has loss scalers also gives ``scaled_step(optimizer, scaler)`` and
    ``unscale_grads_(optimizer, scaler)``.
    """

    AdamW: Callable[..., Any]
    Adam: Callable[..., Any]
    SGD: Callable[..., Any]

    def is_optimizer(self, value: object) -> bool: ...
    def gradient_of(self, parameter: Any) -> Any | None:
        """What a step takes: ``grad``, else ``main_grad``."""
        ...

    def optimizer_state(self, optimizer: Any, parameter: Any) -> Mapping[str, Any]: ...
    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any: ...
    def clip_grad_norm_(
        self, parameters: Sequence[Any], max_norm: float, *, norm_type: float, error_if_nonfinite: bool
    ) -> Any:
        """The total norm before clipping, a scalar tensor. ``parameters`` hold each one once."""
        ...

    def zero_grad(self, target: Any, *, set_to_none: bool = True) -> None:
        """``target`` is a module or an optimizer."""
        ...
