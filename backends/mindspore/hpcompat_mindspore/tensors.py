"""Flat buffers and what is done to them: allocate, cast, pack, cut, add, divide.

[Note: numpy on the CPU]
On the CPU a buffer is a numpy array, and ``Tensor.from_numpy`` makes the tensors that share its memory: MPI wants host
memory anyway, a numpy operation costs a twentieth of a MindSpore one, and several of MindSpore's in-place operators and
views do not do on the CPU what their names say. On Ascend a buffer is a tensor. The code that gathers and reduces is
the same for both and calls the methods below.

[Note: queued operations]
MindSpore queues operations and runs them behind the caller's back. So memory that queued operations may still write
(``read`` waits for them) or read must not be touched: buffers that tensors were made of are dropped, never reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import Tensor, ops

FLOATING = (mindspore.float32, mindspore.bfloat16, mindspore.float16, mindspore.float64)
# Arithmetic of these is done in float32 and rounded once per operation, as torch does.
_NARROW = (mindspore.bfloat16, mindspore.float16)
_NUMPY_DTYPES: dict[Any, np.dtype[Any]] = {}

Buffer = Any  # numpy.ndarray on the CPU, mindspore.Tensor on Ascend


def is_floating(dtype: Any) -> bool:
    return dtype in FLOATING


def cast_floating(tensor: Tensor, dtype: Any) -> Tensor:
    """``tensor`` in ``dtype`` if it is floating and is not already; differentiable."""
    return tensor.astype(dtype) if tensor.dtype != dtype and is_floating(tensor.dtype) else tensor


class Memory(Protocol):
    """The buffers of one kind of device. Arguments called ``buffer`` have one dim, if nothing else is said."""

    def empty(self, numel: int, dtype: Any) -> Buffer: ...
    def zeros(self, shape: Sequence[int], dtype: Any) -> Buffer: ...
    def read(self, tensor: Tensor) -> Buffer:
        """The data of ``tensor``, in its shape, after all operations queued on it; may share its memory."""
        ...

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        """A tensor of ``shape`` over the start of ``buffer``; may share its memory."""
        ...

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor that shares no memory."""
        ...

    def pack(self, columns: Sequence[Buffer], dtype: Any, *, out: Buffer | None = None) -> Buffer:
        """``[rows, n_i]`` pieces side by side, in ``dtype``, flat."""
        ...

    def unpack(self, buffer: Buffer, num_rows: int, sizes: Sequence[int]) -> list[Buffer]:
        """The reverse: contiguous flat copies of the columns of ``[num_rows, sum(sizes)]``."""
        ...

    def pad(self, buffer: Buffer, numel: int) -> Buffer:
        """``buffer`` with zeros up to ``numel``."""
        ...

    def cast(self, buffer: Buffer, dtype: Any) -> Buffer: ...
    def add(self, left: Buffer, right: Buffer) -> Buffer:
        """Their sum in the dtype of ``left``; reuses its memory where it can."""
        ...

    def add_at(self, buffer: Buffer, start: int, addend: Buffer) -> Buffer:
        """``buffer`` with ``addend`` added from ``start`` on; reuses its memory where it can."""
        ...

    def divide(self, buffer: Buffer, divisor: float) -> Buffer: ...
    def multiply(self, buffer: Buffer, factor: Any) -> Buffer: ...


class HostMemory:
    """numpy arrays. [Note: numpy on the CPU]"""

    def empty(self, numel: int, dtype: Any) -> Buffer:
        return np.empty(numel, numpy_dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Buffer:
        return np.zeros(tuple(shape), numpy_dtype(dtype))

    def read(self, tensor: Tensor) -> Buffer:
        return tensor.asnumpy()

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        numel = prod(shape)
        return Tensor.from_numpy(buffer[:numel].reshape(shape))

    def copy_of(self, tensor: Tensor) -> Tensor:
        return Tensor.from_numpy(tensor.asnumpy().copy())

    def pack(self, columns: Sequence[Buffer], dtype: Any, *, out: Buffer | None = None) -> Buffer:
        num_rows = columns[0].shape[0]
        if out is None:
            out = self.empty(sum(column.size for column in columns), dtype)
        table, start = out.reshape(num_rows, -1), 0
        for column in columns:
            table[:, start : start + column.shape[1]] = column
            start += column.shape[1]
        return out

    def unpack(self, buffer: Buffer, num_rows: int, sizes: Sequence[int]) -> list[Buffer]:
        if len(sizes) == 1:
            return [buffer]
        table, start, columns = buffer.reshape(num_rows, -1), 0, []
        for size in sizes:
            columns.append(table[:, start : start + size].copy().reshape(-1))
            start += size
        return columns

    def pad(self, buffer: Buffer, numel: int) -> Buffer:
        if buffer.size == numel:
            return buffer
        padded = np.zeros(numel, buffer.dtype)
        if buffer.size:  # no elements of MindSpore's bfloat16 crash the process
            padded[: buffer.size] = buffer
        return padded

    def cast(self, buffer: Buffer, dtype: Any) -> Buffer:
        return buffer.astype(numpy_dtype(dtype), copy=False)

    def add(self, left: Buffer, right: Buffer) -> Buffer:
        return add_arrays(left, right, out=left)

    def add_at(self, buffer: Buffer, start: int, addend: Buffer) -> Buffer:
        piece = buffer[start : start + addend.size]
        add_arrays(piece, addend, out=piece)
        return buffer

    def divide(self, buffer: Buffer, divisor: float) -> Buffer:
        if is_narrow(buffer):
            buffer[...] = buffer.astype(np.float32) / np.float32(divisor)
            return buffer
        return np.divide(buffer, buffer.dtype.type(divisor), out=buffer)

    def multiply(self, buffer: Buffer, factor: Any) -> Buffer:
        value = factor.asnumpy().reshape(()) if isinstance(factor, Tensor) else factor
        if is_narrow(buffer):
            buffer[...] = buffer.astype(np.float32) * np.float32(value)
            return buffer
        return np.multiply(buffer, buffer.dtype.type(value), out=buffer)


class DeviceMemory:
    """Tensors, by functions that return new ones: nothing here relies on views or in-place operators."""

    def empty(self, numel: int, dtype: Any) -> Buffer:
        return mindspore.mint.empty((numel,), dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Buffer:
        return ops.zeros(tuple(shape), dtype)

    def read(self, tensor: Tensor) -> Buffer:
        return ops.stop_gradient(tensor.contiguous())

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        # A copy: some kernels look at the memory behind a tensor, which a view would share.
        numel = prod(shape)
        return buffer[:numel].reshape(tuple(shape)).copy()

    def copy_of(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().copy()

    def pack(self, columns: Sequence[Buffer], dtype: Any, *, out: Buffer | None = None) -> Buffer:
        packed = ops.cat([column.astype(dtype) for column in columns], axis=1).reshape(-1)
        if out is None:
            return packed
        out.copy_(packed)
        return out

    def unpack(self, buffer: Buffer, num_rows: int, sizes: Sequence[int]) -> list[Buffer]:
        if len(sizes) == 1:
            return [buffer]
        return [column.reshape(-1) for column in ops.split(buffer.reshape(num_rows, -1), list(sizes), axis=1)]

    def pad(self, buffer: Buffer, numel: int) -> Buffer:
        if buffer.size == numel:
            return buffer
        return ops.cat([buffer, ops.zeros((numel - buffer.size,), buffer.dtype)])

    def cast(self, buffer: Buffer, dtype: Any) -> Buffer:
        return buffer.astype(dtype)

    def add(self, left: Buffer, right: Buffer) -> Buffer:
        return (left + right).astype(left.dtype)

    def add_at(self, buffer: Buffer, start: int, addend: Buffer) -> Buffer:
        end = start + addend.size
        return ops.cat([buffer[:start], self.add(buffer[start:end], addend), buffer[end:]])

    def divide(self, buffer: Buffer, divisor: float) -> Buffer:
        return (buffer / divisor).astype(buffer.dtype)

    def multiply(self, buffer: Buffer, factor: Any) -> Buffer:
        return (buffer * factor).astype(buffer.dtype)


HOST = HostMemory()
DEVICE = DeviceMemory()


def memory_of(device: str) -> Memory:
    return HOST if device == "CPU" else DEVICE


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """numpy's dtype for MindSpore's, which registers one of its own for bfloat16."""
    if dtype not in _NUMPY_DTYPES:
        _NUMPY_DTYPES[dtype] = Tensor([0], dtype).asnumpy().dtype
    return _NUMPY_DTYPES[dtype]


def is_narrow(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.itemsize == 2 and any(array.dtype == numpy_dtype(dtype) for dtype in _NARROW)


def add_arrays(
    left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], *, out: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """``left + right`` into ``out``, in its dtype, rounded once."""
    if is_narrow(out):
        out[...] = left.astype(np.float32) + right.astype(np.float32)
        return out
    return np.add(left, right, out=out, casting="unsafe")
