"""The ranks of a job, the same calls on both frameworks: join, ask who one is, make meshes, agree on numbers.

The names are those of ``torch.distributed``. What they return is the framework's own: a mesh of torch is torch's
``DeviceMesh``, a group its ``ProcessGroup``. Scripts that need one framework only may as well call that framework.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hpcompat import registry
from hpcompat.core.failure import naming

TIMEOUT_VARIABLE = "HPCOMPAT_TIMEOUT"
# As long as torch waits. For transports that would wait for ever.
DEFAULT_TIMEOUT = timedelta(minutes=30)
_OPS = ("sum", "avg", "max", "min")


def init_process_group(
    *, backend: str | None = None, device: str | None = None, timeout: timedelta | None = None
) -> None:
    """Join the ranks that the launcher started; a process that no launcher started becomes a job of one.

    From then on ``backend`` is the one that all calls without an object of a framework mean.

    Args:
        backend: ``"torch"`` or ``"mindspore"``; by default as ``HPCOMPAT_BACKEND`` says, else the one installed.
        device: ``"cpu"``, ``"cuda"``, ``"npu"``, ...; by default the accelerator if there is one per process.
        timeout: how long a collective waits for the other ranks; by default ``HPCOMPAT_TIMEOUT`` in seconds, else as
            long as the framework does, over MPI half an hour as torch does. After it a :class:`CollectiveError` names
            the collective and the unit.

    MindSpore records operations for :func:`hpcompat.backward` from here on, as torch always does.

    Raises:
        ValueError: an unknown backend, fewer devices than processes, or a timeout that is not above 0.
        RuntimeError: called twice.
        CapabilityError: the transport cannot do it, such as a timeout over hccl.
        TypeError: ``timeout`` is no ``timedelta``.
    """
    if timeout is None:
        timeout = timeout_from_environment()
    elif not isinstance(timeout, timedelta):
        raise TypeError(f"expected timeout to be a datetime.timedelta, but got {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"expected a timeout above 0, but got {timeout}")
    impl = registry.get_backend(backend)
    if impl.distributed.is_initialized():
        raise RuntimeError("expected init_process_group once, but got a second call; destroy_process_group comes first")
    impl.distributed.init_process_group(device=device, timeout=timeout)
    registry.make_default(impl.name)


def timeout_from_environment() -> timedelta | None:
    """What ``HPCOMPAT_TIMEOUT`` says, in seconds.

    Raises:
        ValueError: it is no number above 0.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        timeout = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if timeout <= timedelta(0):
        raise ValueError(f"expected {TIMEOUT_VARIABLE} to be a number of seconds above 0, but got {text!r}")
    return timeout


def destroy_process_group() -> None:
    """Leave the job. Collectives must have ended on all ranks; :func:`barrier` first, if in doubt."""
    registry.get_backend().distributed.destroy_process_group()
    registry.make_default(None)


def get_backend_name() -> str:
    """``"torch"`` or ``"mindspore"``: the backend that calls without an object of a framework go to."""
    return registry.get_backend().name


def is_initialized() -> bool:
    """Whether this process has joined, by our call or the framework's own."""
    return registry.get_backend().distributed.is_initialized()


def device_type() -> str:
    """What this process computes on: ``"cpu"``, ``"cuda"``, ``"npu"``."""
    return registry.get_backend().distributed.device_type()


def get_rank(group: Any = None) -> int:
    """This process's place in ``group`` (``mesh.get_group(...)``), by default among all ranks."""
    return registry.get_backend().distributed.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """The number of ranks of ``group``, by default of the job."""
    return registry.get_backend().distributed.get_world_size(group)


def barrier(group: Any = None) -> None:
    """Wait until every rank of ``group`` is here."""
    with naming("a barrier"):
        registry.get_backend().distributed.barrier(group)


def all_reduce_scalar(value: float, *, op: str = "sum", group: Any = None) -> float:
    """One number from one number per rank, the same bits on every rank and on both frameworks.

    The ranks exchange the numbers, and each reduces them in the order of the ranks: ints exactly, floats in float64.

    Args:
        value: an int within 64 bits or a float; ranks may mix the two, the result is then a float.
        op: ``"sum"``, ``"avg"`` (always a float), ``"max"`` or ``"min"``.
        group: of a mesh; by default all ranks. Collective over it.

    Raises:
        TypeError: ``value`` is not a Python number.
        ValueError: an unknown ``op``, or an int of more than 64 bits.
    """
    if op not in _OPS:
        raise ValueError(f"expected op to be one of {_OPS}, but got {op!r}")
    packed = _pack(value)
    with naming("an exchange of numbers (all_reduce_scalar, agree)"):
        packages = registry.get_backend().distributed.gather_bytes(packed, group)
    values = [_unpack(package) for package in packages]
    if op == "max":
        return max(values)
    if op == "min":
        return min(values)
    total = sum(values)
    return total / len(values) if op == "avg" else total


def agree(ok: bool, *, group: Any = None) -> bool:
    """Whether all ranks passed ``True``: the same answer on every rank.

    For steps that all ranks keep or drop together. It is a collective, so a rank that raised comes to it only after
    the collectives of the step that the others wait for: where there are such, see :meth:`HSDPModule.catch_up`.

    Args:
        ok: whether this rank's part went well.
        group: of a mesh; by default all ranks.

    Raises:
        TypeError: ``ok`` is not a bool.
    """
    if not isinstance(ok, bool):
        raise TypeError(f"expected ok to be a bool, but got {ok!r}")
    return all_reduce_scalar(int(ok), op="min", group=group) == 1


def _pack(value: object) -> bytes:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a Python number, but got a {type(value).__name__}; pass value.item()")
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    try:
        return b"q" + struct.pack("<q", value)
    except struct.error:
        raise ValueError(f"expected an int within 64 bits, but got {value}; pass a float") from None


def _unpack(data: bytes) -> float:
    value: float = struct.unpack(f"<{data[:1].decode()}", data[1:])[0]
    return value


def init_device_mesh(
    device_type: str | None,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend: str | None = None,
) -> Any:
    """All ranks in row-major order as an array with one dim per axis (torch's function and ``DeviceMesh`` surface).

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"``; ``None`` for this process's own.
        mesh_shape: ranks per axis.
        mesh_dim_names: one name per axis, for ``mesh["dp"]`` and ``mesh["dp", "cp"]``.
        backend: as in :func:`init_process_group`.

    Raises:
        ValueError: the shape does not hold as many ranks as there are, or the names do not fit it.
        TypeError: the shape or the names are not a sequence.
    """
    if not isinstance(mesh_shape, Sequence):
        raise TypeError(f"expected mesh_shape to be a tuple, but got {mesh_shape!r}; for one axis: ({mesh_shape!r},)")
    if isinstance(mesh_dim_names, str):
        raise TypeError(
            f"expected mesh_dim_names to be a tuple, but got {mesh_dim_names!r}; for one axis: ({mesh_dim_names!r},)"
        )
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    if names is not None and len(names) != len(mesh_shape):
        raise ValueError(f"expected a name for each of the {len(mesh_shape)} axes of the mesh, but got {names!r}")
    return registry.get_backend(backend).distributed.init_device_mesh(device_type, tuple(mesh_shape), names)
