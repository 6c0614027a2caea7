"""What the ranks run: a few steps of a small model, recorded or not. All ranks have the same batch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

import hpcompat
from hpcompat_mindspore import checkpoint, optim
from ms_models import Net, batch, initialize, loss_of, named
from ms_truth import wrap

NUM_STEPS = 2


def train(directory: Path | None, **options: Any) -> list[bytes]:
    """The bits of this rank's shards after each step."""
    model = wrap(initialize(Net()))
    optimizer = hpcompat.optim.AdamW(list(hpcompat.parameters(model)), lr=1e-2, **options)
    found = []
    recorded = contextlib.nullcontext() if directory is None else hpcompat.record(model, optimizer, directory)
    with recorded as recording:
        for step in range(NUM_STEPS):
            loss = loss_of(model, batch(0, step=step))
            hpcompat.backward(loss)
            if recording is not None:
                recording.loss(loss)
                recording.phase("after_backward")
            hpcompat.optimizer_step(optimizer)
            hpcompat.zero_grad(optimizer)
            found += [parameter.asnumpy().tobytes() for parameter in named(model).values()]
    return found


def recording_changes_nothing(directory: Path) -> None:
    untouched, recorded = train(None), train(directory)
    assert recorded == untouched
    assert len(set(recorded)) == NUM_STEPS * len(named(Net()))


def write(directory: Path) -> dict[str, bytes]:
    """One file per dtype; the bits that were meant."""
    meant = {}
    for dtype in ("float32", "float16", "bfloat16", "int64"):
        tensor = Tensor(np.array([[1.0, -0.0, 3.5]], np.float32)).astype(getattr(mindspore, dtype))
        meant[dtype] = tensor.asnumpy().tobytes()
        checkpoint.write_tensors(directory / dtype, [("one", tensor), ("number", Tensor(np.float32(2)))])
    return meant


def states_of_mindspores_own() -> None:
    """By parameter; the parameters themselves are no states."""
    model = initialize(Net())
    optimizer = nn.Adam(list(named(model).values()))
    for parameter in named(model).values():
        states = optim.optimizer_state(optimizer, parameter)
        assert len(states) == 2, states.keys()
        assert all(state is not parameter and parameter.name in state.name for state in states.values())
    assert optim.optimizer_state(optimizer, named(initialize(Net()))["head.weight"]) == {}
