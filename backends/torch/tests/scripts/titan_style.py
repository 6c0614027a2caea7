"""A training script in the manner of TorchTitan. Started by torchrun; prints one RESULT line.

A model made on the meta device, activation checkpointing, a reshard policy per unit, FSDP and HSDP meshes, gradient
accumulation that all-reduces once, and a loss normalised by the tokens of all ranks, so that gradients are summed.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, IGNORED = 97, 32, 4, 4, 12, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x, angles):
        heads = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        query, key, value = heads.unbind(dim=2)
        mixed = F.scaled_dot_product_attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        hidden = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))

    def init_weights(self):
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for linear in (self.wqkv, self.wo, self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, std=0.02)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("angles", self.make_angles(), persistent=False)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def make_angles(self):
        size = WIDTH // HEADS
        return torch.outer(torch.arange(LENGTH), 10_000.0 ** (-torch.arange(0, size, 2) / size))

    def init_weights(self):
        """To be called after `to_empty`: on meta nothing has a value, the buffer included."""
        self.angles.copy_(self.make_angles())
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=WIDTH**-0.5)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.angles)
        return self.output(self.norm(h))


def rotate(x, angles):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).to(x.dtype)


def apply_activation_checkpointing(model):
    for name, block in list(model.layers.named_children()):
        if int(name) % 2 == 0:
            model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def apply_fsdp(model, *, mesh, reshard_policy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = {"mesh": mesh, "mp_policy": policy}
    reshard = {"always": True, "never": False, "default": True}[reshard_policy]
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=reshard)
    # Backward begins where forward ends, so by default these stay gathered between the two.
    fully_shard([model.norm, model.output], **config, reshard_after_forward=reshard_policy == "always")
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss divides by the tokens of all ranks, so gradients are summed. gloo has no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def microbatch(index):
    torch.manual_seed(7000 + index * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1))
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape) < 0.3] = IGNORED
    return tokens[:, :-1], labels


def train_step(model, optimizer, scheduler, *, step, num_microbatches):
    optimizer.zero_grad()
    batches = [microbatch(step * num_microbatches + index) for index in range(num_microbatches)]
    num_tokens = torch.stack([(labels != IGNORED).sum() for _, labels in batches]).sum()
    dist.all_reduce(num_tokens)
    total = torch.zeros(())
    for index, (tokens, labels) in enumerate(batches):
        is_last = index == num_microbatches - 1
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        logits = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED) / num_tokens
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0, foreach=True)
    assert isinstance(norm, DTensor)
    optimizer.step()
    scheduler.step()
    dist.all_reduce(total)
    return total.item(), norm.full_tensor().item()


def train(*, mesh, reshard_policy):
    with torch.device("meta"):
        model = Transformer()
    apply_activation_checkpointing(model)
    apply_fsdp(model, mesh=mesh, reshard_policy=reshard_policy)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    history = [train_step(model, optimizer, scheduler, step=step, num_microbatches=3) for step in range(5)]
    return history, digest(model, optimizer), f"{type(model).__module__}.{type(model).__name__}"


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
    world_size = dist.get_world_size()
    fsdp = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    names = ("dp_replicate", "dp_shard")
    replicas = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=names)
    one_replica = init_device_mesh("cpu", (1, world_size), mesh_dim_names=names)
    runs = [(fsdp, "default"), (fsdp, "never"), (replicas, "default"), (one_replica, "always")]
    result = [train(mesh=mesh, reshard_policy=policy) for mesh, policy in runs]
    if dist.get_rank() == 0:
        print("MODEL", result[0][2], flush=True)
        print("RESULT", repr([(history, digest) for history, digest, _ in result]), flush=True)
    leave()


if __name__ == "__main__":
    main()
