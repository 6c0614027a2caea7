"""The decoder in PyTorch, and the functions of `framework.Framework` for it."""

from __future__ import annotations

import importlib
import math
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from comparison import Counts, Snapshot
from framework import World
from options import VOCABULARY, Options

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings; groups of query heads share one key and value head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, width: int, heads: int, kv_heads: int, seq_len: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query = nn.Linear(width, heads * self.head_size, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(heads * self.head_size, width, bias=False)
        # Buffers, not inputs: mixed precision casts the inputs of a unit, and angles need fp32.
        frequencies = 10_000.0 ** (-torch.arange(0, self.head_size, 2) / self.head_size)
        angles = torch.outer(torch.arange(seq_len), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, width) -> (batch, seq, width)"""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query), self.rotate(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each (i, i + half) pair of a head's features by the position's angle. (batch, head, seq, head_size)"""
        seq_len = x.shape[-2]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, *, width: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(width * 8 / 3 / 32)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, *, width: int, heads: int, kv_heads: int, seq_len: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width=width, heads=heads, kv_heads=kv_heads, seq_len=seq_len)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = SwiGLU(width=width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """(batch, seq) of token numbers -> (batch, seq, VOCABULARY) logits."""

    def __init__(self, *, layers: int, width: int, heads: int, kv_heads: int, seq_len: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, kv_heads=kv_heads, seq_len=seq_len) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(options: Options) -> Decoder:
    torch.manual_seed(options.seed)
    return Decoder(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        seq_len=options.seq_len,
        tied=options.tied,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The process and its device


def start(options: Options) -> World:
    device = _pick_device(options.device)
    # Without these, an accelerator may add up in another order from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    backend = dist.get_default_backend_for_device(device.type)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def finish(exit_code: int) -> NoReturn:
    dist.barrier()
    dist.destroy_process_group()
    # Not through the interpreter's shutdown: a gloo thread that drops its last tensor in there aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _pick_device(wanted: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.accelerator.device_count() if accelerator else 0
    if wanted == "cpu" or (wanted == "auto" and num_devices < num_ranks):
        return torch.device("cpu")
    if accelerator is None or wanted not in ("auto", accelerator.type) or num_devices < num_ranks:
        present = f"{num_devices} of {accelerator or 'no accelerator'}"
        raise ValueError(f"expected {num_ranks} devices for --device {wanted}, but got {present}; use --device auto")
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device)
    return device


# ---------------------------------------------------------------------------------------------------------------------
# Sharding: the one place that calls hpcompat, or native FSDP2 instead


def shard_model(model: Decoder, *, options: Options, world: World, implementation: str) -> None:
    fsdp = _implementation(implementation)
    mesh = _make_mesh(options, world=world)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[options.dtype], reduce_dtype=torch.float32)
    how = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": options.reshard}
    for block in model.blocks:
        fsdp.fully_shard(block, **how)
    if options.tied:
        # A shared weight must belong to one unit, so the modules that share it are gathered together.
        fsdp.fully_shard([model.embedding, model.norm, model.head], **how)
    fsdp.fully_shard(model, **how)


def _implementation(name: str) -> ModuleType:
    return importlib.import_module({"hpcompat": "hpcompat", "native": "torch.distributed.fsdp"}[name])


def _make_mesh(options: Options, *, world: World) -> DeviceMesh:
    if options.mesh == "fsdp":
        return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("dp_shard",))
    if world.size % 2:
        raise ValueError(f"expected an even number of ranks for --mesh hsdp, but got {world.size}; use --mesh fsdp")
    return init_device_mesh(world.device.type, (2, world.size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))


# ---------------------------------------------------------------------------------------------------------------------
# One step of training


def make_optimizer(model: nn.Module, *, options: Options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95), foreach=True)


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)


def compute_loss(model: nn.Module, batch: NDArray[np.int64], *, world: World) -> Tensor:
    tokens = torch.from_numpy(batch).to(world.device)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def backward(loss: Tensor, *, num_microbatches: int) -> float:
    (loss / num_microbatches).backward()
    return loss.item()


def clip_gradients(model: nn.Module, *, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# What the report needs


def mean_over_ranks(value: float, *, world: World) -> float:
    total = torch.tensor(value, dtype=torch.float32, device=world.device)
    dist.all_reduce(total)
    return total.item() / world.size


def sum_over_ranks(counts: Counts, *, world: World) -> Counts:
    total = torch.tensor(counts, dtype=torch.int64, device=world.device)
    dist.all_reduce(total)
    return Counts(*total.tolist())


def sharded_bytes(model: nn.Module) -> int:
    return sum(_local(parameter).nbytes for parameter in model.parameters())


class UnshardedBytes:
    """Samples the bytes of the plain parameters, in the middle of each block's forward and of its backward.

    Those are the moments when most is gathered. hpcompat and native FSDP2 both register a plain parameter while its
    unit is gathered, and a DTensor otherwise, so one measure serves both. A gather still under way is not counted.
    """

    def __init__(self, model: Decoder) -> None:
        self.peak_bytes = 0
        self._model = model
        # On a part that is no unit itself, so that no hook of the library gathers or frees at the same moment.
        self._handles = [block.feed_forward.register_forward_hook(self._after_forward) for block in model.blocks]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._sample()
        output.register_hook(lambda gradient: self._sample())

    def _sample(self) -> None:
        gathered = (p for p in self._model.parameters() if not isinstance(p, DTensor))
        self.peak_bytes = max(self.peak_bytes, sum(p.nbytes for p in gathered if p.untyped_storage().nbytes()))


def watch_unsharded_bytes(model: Decoder) -> UnshardedBytes:
    return UnshardedBytes(model)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    named = dict(model.named_parameters())
    return {
        "parameters": {name: _bits(parameter) for name, parameter in named.items()},
        "gradients": {name: _bits(p.grad) for name, p in named.items() if p.grad is not None},
        "AdamW states": {
            f"{name}.{key}": _bits(value) for name, p in named.items() for key, value in optimizer.state[p].items()
        },
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bits(tensor: Tensor) -> NDArray[Any]:
    """A copy of the local shard, as integers when numpy does not know the dtype."""
    local = _local(tensor.detach()).cpu().clone()
    return (local.view(torch.int16) if local.dtype == torch.bfloat16 else local).numpy()
