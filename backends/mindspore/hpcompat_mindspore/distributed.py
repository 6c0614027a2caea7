"""Joining the job and its device: MPI on the CPU, hccl on Ascend (not run on the hardware yet)."""

from __future__ import annotations

from datetime import timedelta

import mindspore
import numpy as np
from mindspore import Tensor

from hpcompat_mindspore import autograd, job, probe
from hpcompat_mindspore.communicator import Communicator
from hpcompat_mindspore.mesh import DeviceMesh

# The same room of torch's has the word npu.
from hpcompat_mindspore.mesh import init_device_mesh as make_mesh
from hpcompat_mindspore.tensors import memory_of

_TARGETS = {"cpu": "CPU", "npu": "Ascend", "ascend": "Ascend"}


def init_process_group(*, device: str | None, timeout: timedelta | None) -> None:
    if device is not None:
        mindspore.set_device(_target(device))  # before the probe, which computes: then it is too late
    probe.require()
    job.world()
    if timeout is not None:
        job.set_timeout(timeout)
    autograd.start_recording()


def _target(device: str) -> str:
    if device.lower() not in _TARGETS:
        raise ValueError(f"expected device to be one of {tuple(_TARGETS)}, but got {device!r}")
    return _TARGETS[device.lower()]


def destroy_process_group() -> None:
    autograd.stop_recording()
    job.leave()


def is_initialized() -> bool:
    return job.has_joined()


def device_type() -> str:
    return "cpu" if mindspore.get_context("device_target") == "CPU" else "npu"


def get_rank(group: Communicator | None) -> int:
    return (group or job.world()).rank()


def get_world_size(group: Communicator | None) -> int:
    return (group or job.world()).size()


def barrier(group: Communicator | None) -> None:
    (group or job.world()).barrier()


def gather_bytes(data: bytes, group: Communicator | None) -> list[bytes]:
    members = group or job.world()
    memory = memory_of("CPU" if device_type() == "cpu" else "Ascend")
    mine = memory.read(Tensor(np.frombuffer(data, np.uint8)))
    everyone = memory.empty(members.size() * len(data), mindspore.uint8)
    members.all_gather(everyone, mine).wait()
    joined = memory.tensor(everyone, (members.size() * len(data),)).asnumpy().tobytes()
    return [joined[start : start + len(data)] for start in range(0, len(joined), len(data))]


def init_device_mesh(
    kind: str | None, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
) -> DeviceMesh:
    return make_mesh(_target(kind or device_type()), mesh_shape, mesh_dim_names=mesh_dim_names)
