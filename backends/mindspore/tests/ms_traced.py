"""What the ranks run: two steps, traced and not traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import traced_steps
from ms_models import Net, initialize, named
from ms_truth import mesh_of, sgd, train, wrap, zero_grad


def steps(model: Any) -> list[bytes]:
    """Losses, gradients and parameters of two steps of gradient descent, as bits."""
    found = []
    for step in range(2):
        found.append(np.float64(train(model, step=step)).tobytes())
        parameters = list(named(model).values())
        grads = [parameter.grad for parameter in parameters]
        sgd(parameters, grads)
        found += [tensor.asnumpy().tobytes() for tensor in (*grads, *parameters)]
        zero_grad(model)
    return found


def run(shape: tuple[int, ...], out: Path) -> traced_steps.Result:
    return traced_steps.run(lambda: wrap(initialize(Net()), mesh=mesh_of(shape)), steps, out=out)
