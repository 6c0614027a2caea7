"""Writes the scheduler's events, the collectives, losses and gradients of some ways to train, on either framework.

    hpcompat launch -n 2 --backend torch|mindspore backends/mindspore/tests/parity/schedules.py OUT.json

The two files must have the same events and collectives. The model is the same, as are its weights and the data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpcompat

if os.environ["HPCOMPAT_BACKEND"] == "torch":
    import schedules_torch as side
else:
    import schedules_mindspore as side  # type: ignore[no-redef]

Result = tuple[list[float], dict[str, Any]]


class Block(side.Module):  # type: ignore[misc, name-defined]
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = side.Linear(size, hidden), side.Linear(hidden, size)

    def run(self, x: Any) -> Any:
        return self.down(side.relu(self.up(x)))


class Net(side.Module):  # type: ignore[misc, name-defined]
    def __init__(self, *, hidden: int = 10) -> None:
        super().__init__()
        self.layers = side.ModuleList([Block(6, hidden) for _ in range(3)])
        self.head = side.Linear(6, 5)

    def run(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def initialized(**options: Any) -> Any:
    model, numbers = Net(**options), np.random.default_rng(0)
    for parameter in side.named(model).values():
        side.fill(parameter, (numbers.normal(size=tuple(parameter.shape)) * 0.3).astype(np.float32))
    return model


def built(*, hidden: int = 10, **options: Any) -> Any:
    model = initialized(hidden=hidden)
    for layer in model.layers:
        hpcompat.fully_shard(layer, **options)
    return hpcompat.fully_shard(model, **options)


def loss_of(model: Any, step: int) -> Any:
    numbers = np.random.default_rng([side.RANK, step])
    x, y = (side.tensor(numbers.normal(size=(4, size)).astype(np.float32)) for size in (6, 5))
    return ((model(x) - y) ** 2).mean()


def gradients(model: Any) -> dict[str, Any]:
    found = side.named(model).items()
    return {name: side.full_gradient(parameter).tolist() for name, parameter in found if parameter.grad is not None}


def train(model: Any, *, num_steps: int = 2) -> Result:
    losses = []
    for step in range(num_steps):
        model.zero_grad()
        loss = loss_of(model, step)
        side.backward(loss)
        losses.append(side.number(loss))
    return losses, gradients(model)


def accumulate() -> Result:
    model, losses = built(), []
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model.set_is_last_backward(step == 2)
        loss = loss_of(model, step)
        side.backward(loss)
        losses.append(side.number(loss))
    return losses, gradients(model)


def partial_all_reduce() -> Result:
    model = built(mesh=side.mesh((2, side.NUM_RANKS // 2), ("replicate", "shard")))
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        side.backward(loss_of(model, step))
    return [], gradients(model)


def several_forwards() -> Result:
    model = built()
    losses = [loss_of(model, step) for step in range(2)]
    side.backward(losses[0] + losses[1])
    return [side.number(loss) for loss in losses], gradients(model)


def module_lists() -> Result:
    model = initialized()
    hpcompat.fully_shard([model.layers[0], model.layers[1]])
    hpcompat.fully_shard([model.layers[2], model.head])
    return train(hpcompat.fully_shard(model))


def frozen() -> Result:
    model = initialized()
    for parameter in side.named(model.layers[1]).values():
        parameter.requires_grad = False
    for layer in model.layers:
        hpcompat.fully_shard(layer)
    return train(hpcompat.fully_shard(model))


def evaluation_between() -> Result:
    model = built()
    with side.no_grad():
        loss_of(model, 7)
    return train(model)


def explicit_prefetch() -> Result:
    model = built()
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return train(model)


def reset_after_forward() -> Result:
    model = built()
    loss_of(model, 0)
    model.reset_iter_state()
    return train(model)


def ways() -> dict[str, Callable[[], Result]]:
    """Every way to train that fits the number of ranks."""
    half = side.NUM_RANKS // 2
    found: dict[str, Callable[[], Result]] = {
        "plain": lambda: train(built()),
        "kept after forward": lambda: train(built(reshard_after_forward=False)),
        "freed after forward": lambda: train(built(reshard_after_forward=True)),
        "uneven": lambda: train(built(hidden=3)),
        "one collective per parameter": lambda: train(built(comm_fusion=False)),
        "hsdp": lambda: train(built(mesh=side.mesh((2, half), ("replicate", "shard")))),
        "accumulation": accumulate,
        "partial all-reduce": partial_all_reduce,
        "several forwards": several_forwards,
        "module lists": module_lists,
        "frozen": frozen,
        "evaluation between": evaluation_between,
        "explicit prefetch": explicit_prefetch,
        "reset after forward": reset_after_forward,
    }
    if half > 1:
        found["slices after forward"] = lambda: train(built(reshard_after_forward=half))
    return found


def main() -> None:
    found = {}
    with side.recorded() as collectives:
        for name, way in ways().items():
            collectives.clear()
            with hpcompat.record_events() as events:
                losses, grads = way()
            found[name] = {
                "events": [f"{event.name} {event.unit} {event.state.name}" for event in events],
                "collectives": [f"{kind} {num_bytes}" for kind, num_bytes in collectives],
                "losses": losses,
                "gradients": grads,
            }
    if side.RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    hpcompat.destroy_process_group()


if __name__ == "__main__":
    main()
