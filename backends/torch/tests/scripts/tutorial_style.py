"""A training script as a reader of the FSDP2 tutorial writes it. Started by torchrun; prints one RESULT line.

Mixed precision, explicit prefetching in both directions, gradient clipping, and a full state dict that goes through
rank 0 into a second model, which was sharded on the meta device.
"""

import hashlib
import io
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 101, 32, 4, 4, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(dim=2), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def shard(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Transformer)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for index, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 3]))
        layer.set_modules_to_backward_prefetch(list(reversed(model.layers[max(index - 2, 0) : index])))
    return model


def train(model, optimizer, *, steps):
    losses, norms = [], []
    for step in steps:
        torch.manual_seed(1000 + step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
        # Without this the first layers would wait for their gather: start it before the root's forward.
        model.unshard()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.full_tensor().item())
    return losses, norms


def copy_through_rank_0(model, optimizer):
    """A second model and optimizer in the same state, by way of full tensors on rank 0."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=full)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=full)
    assert bool(model_state) == (dist.get_rank() == 0)
    # As from a file: on the CPU the state dict shares memory with the optimizer's step counters.
    model_state, optimizer_state = through_file(model_state), through_file(optimizer_state)
    with torch.device("meta"):
        twin = shard(Transformer())
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(twin, model_state, options=broadcast)
    twin_optimizer = make_optimizer(twin)
    set_optimizer_state_dict(twin, twin_optimizer, optimizer_state, options=broadcast)
    return twin, twin_optimizer


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def digest(model, optimizer):
    """One hash of the local shards of parameters and optimizer states of all ranks."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = [parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
        for value in values:
            local = value.to_local() if isinstance(value, DTensor) else value
            sha.update(f"{name} {tuple(local.shape)} {local.dtype}".encode() + local.detach().numpy().tobytes())
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sha.hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def leave():
    """End here: in the interpreter's own shutdown, a gloo thread that drops its last tensor would abort the process."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(Transformer())
    optimizer = make_optimizer(model)
    first = train(model, optimizer, steps=range(5))
    twin, twin_optimizer = copy_through_rank_0(model, optimizer)
    same_start = digest(model, optimizer) == digest(twin, twin_optimizer)
    further = train(model, optimizer, steps=range(5, 8))
    twin_further = train(twin, twin_optimizer, steps=range(5, 8))
    result = (first, further, twin_further, same_start, digest(model, optimizer), digest(twin, twin_optimizer))
    if dist.get_rank() == 0:
        print("MODEL", f"{type(model).__module__}.{type(model).__name__}", flush=True)
        print("RESULT", repr(result), flush=True)
    leave()


if __name__ == "__main__":
    main()
