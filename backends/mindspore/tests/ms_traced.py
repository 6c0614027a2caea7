"""What the ranks run: two steps, traced and not traced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import hpcompat
from hpcompat.core.events import Event
from ms_models import Net, initialize, named
from ms_truth import mesh_of, sgd, train, wrap, zero_grad

Result = tuple[list[Event], Counter[tuple[str, str, str]]]


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


def run(shape: tuple[int, ...], out: Path) -> Result:
    """Checks that tracing changes nothing, and writes this rank's file."""
    untraced = steps(wrap(initialize(Net()), mesh=mesh_of(shape)))
    model = wrap(initialize(Net()), mesh=mesh_of(shape))
    with hpcompat.record_events() as events, hpcompat.trace(model) as recording:
        traced = steps(model)
    assert len(traced) > 20
    assert traced == untraced
    assert recording.events == events
    assert not [span for span in recording.spans if span.note or span.end_ns < span.start_ns]
    recording.to_chrome(out / f"rank{recording.rank}.json")
    return recording.events, Counter((span.lane, span.name, span.unit) for span in recording.spans)
