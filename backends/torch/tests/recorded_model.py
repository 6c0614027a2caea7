"""What the ranks run: a few steps of a small model in bfloat16, recorded or not. All ranks have the same batch."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpcompat
from hpcompat_torch import training
from parity.bits import bits

NUM_STEPS = 3
NUM_PARAMETERS = 4


def train(directory: Path | None, **options: Any) -> list[torch.Tensor]:
    """The bits of this rank's shards after each step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 5)).to(torch.bfloat16)
    hpcompat.fully_shard(model[0])
    hpcompat.fully_shard(model)
    optimizer = hpcompat.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    found = []
    recorded = contextlib.nullcontext() if directory is None else hpcompat.record(model, optimizer, directory)
    with recorded as recording:
        for _ in range(NUM_STEPS):
            batch = torch.randn(8, 64, generator=generator).to(torch.bfloat16)
            loss = (model(batch).float() - 1).square().mean()
            loss.backward()
            if recording is not None:
                recording.loss(loss)
                recording.phase("after_backward")
            # Far from clipping: the last bits of a norm depend on the number of ranks.
            hpcompat.clip_grad_norm_(model, 1e6)
            if recording is not None:
                recording.phase("after_clip")
            hpcompat.optimizer_step(optimizer)
            hpcompat.zero_grad(optimizer)
            found += [bits(parameter.to_local()) for parameter in model.parameters()]
    assert hpcompat.optim.listeners == [], "later steps are not recorded"
    return found


def recording_changes_nothing(directory: Path) -> None:
    untouched, recorded = train(None), train(directory)
    assert len(recorded) == len(untouched) == NUM_STEPS * NUM_PARAMETERS
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded, untouched, strict=True))


def one_whole_tensor_at_a_time(directory: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    gather = training.full_tensor

    def full_tensor(parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        assert not [reference for reference in made if reference() is not None]
        whole = gather(parameter, value)
        made.append(weakref.ref(whole))
        return whole

    with mock.patch.object(training, "full_tensor", full_tensor):
        train(directory)
    # Parameters and gradients always, two states more from the first step on.
    num_phases = 4 * NUM_STEPS
    assert len(made) == NUM_PARAMETERS * (2 * num_phases + 2 * (num_phases - 3))


def a_directory_that_cannot_be_used(directory: Path) -> None:
    """All ranks hear of it, and none of them waits."""
    train(directory / "first")
    dist.barrier()
    for path, error in ((directory / "first", ValueError), (directory / "first" / "index.json" / "below", OSError)):
        with pytest.raises(error if dist.get_rank() == 0 else OSError, match=r"expected|Not a directory"):
            train(path)


def a_phase_that_cannot_be_written(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "step-000001").touch()
    with pytest.raises(OSError, match=r"File exists|Not a directory" if dist.get_rank() == 0 else "rank 0"):
        train(directory)
