"""What the ranks run: two steps of a decoder, traced and not traced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import hpcompat
from hpcompat.core.events import Event
from hpcompat.trace import Recording
from parity.bits import bits
from parity.decoder import Decoder, DecoderConfig

Result = tuple[list[Event], Counter[tuple[str, str, str]]]


def sharded_decoder(shape: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig())
    names = ("replicate", "shard")[-len(shape) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    for layer in model.layers:
        hpcompat.fully_shard(layer, **options)
    return hpcompat.fully_shard(model, **options)


def train(model: Any) -> list[torch.Tensor]:
    """Losses, gradients and parameters of two steps of gradient descent, as bits."""
    found = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        tokens = torch.randint(0, 33, (2, 9), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found.append(bits(loss.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(bits(parameter.grad.to_local()))
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
                found.append(bits(parameter.to_local()))
    return found


def run(shape: tuple[int, ...], out: Path) -> Result:
    """Checks that tracing changes nothing, and writes this rank's file."""
    untraced = train(sharded_decoder(shape))
    model = sharded_decoder(shape)
    with hpcompat.record_events() as events, hpcompat.trace(model) as recording:
        traced = train(model)
    assert len(traced) == len(untraced) > 20
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(traced, untraced, strict=True))
    assert recording.events == events
    recording.to_chrome(out / f"rank{recording.rank}.json")
    return recording.events, count_spans(recording)


def count_spans(recording: Recording) -> Counter[tuple[str, str, str]]:
    assert not [span for span in recording.spans if span.note or span.end_ns < span.start_ns]
    return Counter((span.lane, span.name, span.unit) for span in recording.spans)
