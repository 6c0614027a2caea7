"""Joining the job and its device, on top of ``torch.distributed``."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# By the name: the function of this room has it too.
from torch.distributed.device_mesh import init_device_mesh as make_mesh

from hpcompat_torch import collectives, private

# Of all groups; torch gives it to the first one only.
_timeout: timedelta | None = None


def init_process_group(*, device: str | None, timeout: timedelta | None) -> None:
    global _timeout
    chosen = _choose_device(device)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
    if "RANK" not in os.environ:
        # No launcher: a job of one, which needs no address to meet at.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(dist.get_default_backend_for_device(chosen.type), **options)
    _timeout = timeout


def _choose_device(wanted: str | None) -> torch.device:
    """The CPU, or this process's accelerator.

    Raises:
        ValueError: fewer accelerators than processes on this machine, or none of that type.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    num_devices = torch.accelerator.device_count() if accelerator else 0
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted == "cpu" or (wanted is None and num_devices < num_ranks):
        return torch.device("cpu")
    if accelerator is None or wanted not in (None, accelerator.type) or num_devices < num_ranks:
        present = f"{num_devices} of {accelerator.type}" if accelerator else "no accelerator"
        raise ValueError(f'expected {num_ranks} devices for device={wanted!r}, but got {present}; pass device="cpu"')
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def timeout_of_groups() -> timedelta | None:
    """What :func:`init_process_group` was given."""
    return _timeout


def with_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh``, whose groups wait as long as the first one does."""
    for group in mesh.get_all_groups() if _timeout is not None else ():
        # hccl has a timeout of its own.
        if dist.get_backend(group) in ("gloo", "nccl"):
            private.set_timeout_of_group(_timeout, group)
    return mesh


def destroy_process_group() -> None:
    global _timeout
    _timeout = None
    dist.destroy_process_group()
    let_gloo_threads_rest()


def let_gloo_threads_rest() -> None:
    """Wait until no thread of gloo is still letting go of its last tensors; a second at most.

    Groups outlive the call above, as meshes hold them, and so do their threads. One that frees a tensor while the
    interpreter shuts down aborts the process: ``terminate called without an active exception``, exit code -6.
    Here the interpreter's lock is free while we sleep, so a thread that needs it is soon asleep on its queue again.
    """
    for _ in range(1000):
        time.sleep(0.001)
        if not any(_is_awake(task) for task in Path("/proc/self/task").glob("*/stat")):
            return


def _is_awake(task: Path) -> bool:
    try:
        name, _, rest = task.read_text().partition(" (")[2].rpartition(") ")
    except OSError:  # it has ended
        return False
    return name == "pt_gloo_runloop" and not rest.startswith("S")


def is_initialized() -> bool:
    return dist.is_initialized()


def device() -> torch.device:
    """Where new tensors belong: the accelerator, unless the processes talk over the CPU only."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    if dist.is_initialized():
        own = dist.get_default_backend_for_device(accelerator.type)
        if own not in dist.distributed_c10d.get_backend_config():
            return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_type() -> str:
    return device().type


def get_rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def gather_bytes(data: bytes, group: Any) -> list[bytes]:
    if get_world_size(group) == 1:
        return [data]
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device())
    everyone = torch.empty(get_world_size(group) * len(data), dtype=torch.uint8, device=mine.device)
    collectives.all_gather(everyone, mine, group=group, async_op=False)
    joined = everyone.cpu().numpy().tobytes()
    return [joined[start : start + len(data)] for start in range(0, len(joined), len(data))]


def init_device_mesh(
    kind: str | None, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
) -> DeviceMesh:
    return with_timeout(make_mesh(kind or device_type(), mesh_shape, mesh_dim_names=mesh_dim_names))
