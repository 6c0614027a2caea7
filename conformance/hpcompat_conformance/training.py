"""Training a model for its bits: on rough numbers, whose sums betray the order in which they were added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcompat_conformance.framework import Array
from hpcompat_conformance.recipes import Recipe
from hpcompat_conformance.run_context import Context


def trained(
    ctx: Context,
    model: Any,
    recipe: Recipe,
    *,
    steps: Sequence[int] = (0, 1, 2),
    after_step: Callable[[int], None] | None = None,
) -> dict[str, Array]:
    """Train with AdamW, one batch a step. Gives the global gradients of every step and the global values after the
    last, by name. ``after_step(step)`` is called after the optimizer's step. Collective."""
    optimizer = ctx.framework.optimizer(model, kind="adamw", lr=2.0**-6)
    seen: dict[str, Array] = {}
    for step in steps:
        ctx.train(model, ctx.inputs(recipe, step=step, rough=True))
        gradients = {f"gradient of {name} in step {step}": grad for name, grad in ctx.gradients(model).items()}
        seen |= {what: grad for what, grad in gradients.items() if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(step)
    return seen | {f"value of {name} after the last step": value for name, value in ctx.values(model).items()}
