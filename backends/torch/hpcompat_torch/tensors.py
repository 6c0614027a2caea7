"""Storage and views: allocate, free, view, cast.

[Note: one storage, many version counters]
The unsharded parameters of a group live in one storage. It is allocated and freed by resizing, so that tensors which
autograd saved stay valid when the parameters are gathered again. Each parameter is made by ``set_`` on that storage,
not as a view of a flat tensor: views share a version counter, and an in-place update of one parameter would then look
to autograd like one of all. For the same reason filling the storage through other tensors leaves the parameters'
counters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hpcompat_torch import private

# Kernels may pick another path, with other rounding, for less aligned memory: as aligned as a fresh allocation.
ALIGNMENT_BYTES = 64


@contextmanager
def outside_transforms() -> Iterator[None]:
    """What is made here outlives the inference mode or the transform of ``torch.func`` that runs: it is a tensor of
    neither.
    """
    with torch.inference_mode(False), private.OutsideFunctorch():
        yield


def new_storage(num_bytes: int, *, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device=device)


def view_storage(
    storage: torch.UntypedStorage, *, offset_bytes: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor on ``storage`` with a version counter of its own. ``offset_bytes`` must be a multiple of the item
    size.
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset_bytes // dtype.itemsize, tuple(shape), tuple(stride))


def split_storage(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive pieces of ``flat``, each on a storage of its own that is a window of the one of ``flat``.

    As views of ``flat`` they could not be copied by ``copy.deepcopy`` inside a DTensor, and ``torch.save`` of one would
    write all.
    """
    if flat.is_meta:
        return list(flat.split(sizes))
    storage, item, start, pieces = flat.untyped_storage(), flat.itemsize, flat.storage_offset(), []
    for size in sizes:
        window = storage[start * item : (start + size) * item]
        pieces.append(view_storage(window, offset_bytes=0, shape=(size,), stride=(1,), dtype=flat.dtype))
        start += size
    return pieces


def allocate(storage: torch.UntypedStorage, num_bytes: int) -> None:
    if storage.size() != num_bytes:
        storage.resize_(num_bytes)


def free(storage: torch.UntypedStorage) -> None:
    if storage.size() != 0:
        storage.resize_(0)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype`` if it is floating and is not already; differentiable."""
    return tensor.to(dtype) if tensor.dtype is not dtype and tensor.is_floating_point() else tensor
