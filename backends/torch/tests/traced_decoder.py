"""What the ranks run: two steps of a decoder, traced and not traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import hpcompat
import traced_steps
from parity.bits import bits
from parity.decoder import Decoder, DecoderConfig


def sharded_decoder(shape: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig())
    names = ("replicate", "shard")[-len(shape) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    for layer in model.layers:
        hpcompat.fully_shard(layer, **options)
    return hpcompat.fully_shard(model, **options)


def train(model: Any) -> list[bytes]:
    """Losses, gradients and parameters of two steps of gradient descent, as bits."""
    found = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        tokens = torch.randint(0, 33, (2, 9), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found.append(bits(loss.detach()).numpy().tobytes())
        with torch.no_grad():
            for parameter in model.parameters():
                found.append(bits(parameter.grad.to_local()).numpy().tobytes())
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
                found.append(bits(parameter.to_local()).numpy().tobytes())
    return found


def run(shape: tuple[int, ...], out: Path) -> traced_steps.Result:
    return traced_steps.run(lambda: sharded_decoder(shape), train, out=out)
