"""A training script that saves and resumes with DCP. Started by torchrun; prints one RESULT line.

The checkpoint of a model that is sharded over all ranks, rows of 7, 5, 3 and 1 included, is loaded into the same
layout, into replicas, into shards of columns, and into a plain model; each then trains on, to be compared.
"""

import hashlib
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 7), nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)])
        self.wide = nn.Linear(1, 16, bias=False)
        self.mixer = nn.Linear(16, 8)
        self.register_buffer("num_calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.num_calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.mixer(self.wide(x))


class AppState(Stateful):
    """What goes into the checkpoint; DCP calls the two methods."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def by_columns(parameter):
    """Columns where they divide evenly, else rows."""
    even = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even else Shard(0)


def make(*, seed, mesh, shard_placement_fn=None):
    """A sharded model and its optimizer; plain ones when there is no mesh."""
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=shard_placement_fn)
        fully_shard(model, mesh=mesh, shard_placement_fn=shard_placement_fn)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)


def train(model, optimizer, *, steps):
    losses = []
    for step in steps:
        torch.manual_seed(500 + step)
        x = torch.randn(2 * dist.get_world_size(), 8)
        mine = x if not is_sharded(model) else x.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (model(mine) - mine.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_sharded(model):
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def digest(model, optimizer):
    """One hash of the whole parameters and optimizer states, whatever their layout."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = [parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
        for value in values:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            sha.update(f"{name} {tuple(full.shape)} {full.dtype}".encode() + full.detach().numpy().tobytes())
    return sha.hexdigest()


def resume(folder, model, optimizer):
    """The state right after loading, and how the training goes on from there."""
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    loaded = digest(model, optimizer)
    losses = train(model, optimizer, steps=range(4, 7))
    return loaded, model.num_calls.item(), losses, digest(model, optimizer)


def leave():
    """End here: in the interpreter's own shutdown, a gloo thread that drops its last tensor would abort the process."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    rows = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    replicas = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    model, optimizer = make(seed=0, mesh=rows)
    first = train(model, optimizer, steps=range(4))
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folders[0])
    result = [
        first,
        digest(model, optimizer),
        resume(folders[0], *make(seed=1, mesh=rows)),
        resume(folders[0], *make(seed=2, mesh=replicas)),
        resume(folders[0], *make(seed=3, mesh=rows, shard_placement_fn=by_columns)),
        resume(folders[0], *make(seed=4, mesh=None)),
        train(model, optimizer, steps=range(4, 7)),
        digest(model, optimizer),
    ]
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
        print("MODEL", f"{type(model).__module__}.{type(model).__name__}", flush=True)
        print("RESULT", repr(result), flush=True)
    leave()


if __name__ == "__main__":
    main()
