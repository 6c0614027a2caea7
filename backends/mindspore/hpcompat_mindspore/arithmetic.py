"""The element-wise operations of optimizer steps, with the bits of torch's multi-tensor optimizers on the CPU.

[Note: rounding points]
A step is a sequence of operations on whole tensors. Each computes in float32 and rounds once, to the tensor's dtype;
between two of them nothing has more bits than the dtype. That was measured with torch 2.13 on x86-64 with AVX2 or
newer, where:

- ``lerp``, ``addcmul`` and the addition of a multiple are one multiply-add, rounded to float32 once (before the dtype).
- ``value`` multiplies the first factor of ``addcmul`` and the numerator of ``addcdiv``, each rounded to float32.
- A number has the tensor's dtype where a list of tensors is multiplied by it, where it is added, and as the factor of
  an addition (``alpha``); elsewhere it is float32. So a decay of 0.999 is 1 in bfloat16 and an ``eps`` of 1e-8 is 0 in
  float16. (Torch's step of one tensor at a time, ``foreach=False``, multiplies by float32 numbers.)
- The addition of a multiple in bfloat16 and float16 runs over blocks of 32 elements. In those that are left over the
  product is rounded to the dtype too. (Several threads get a part of a large tensor each, so torch's own bits depend on
  their number; here it is one part.)
- Denormals are kept.

One operation is not the same: torch gives the square root of float32 to MKL, which on some processors does not round it
correctly (seen on one of AMD's). Ours is correctly rounded everywhere, as is torch's of 16-bit numbers.

[Note: operations of MindSpore]
On the CPU none is used here. Seen with 2.10.0 there: operations that run on MindSpore's threads, as most on large
tensors do (``copy`` too), take denormals for 0; ``maximum`` loses a NaN in its first argument; a division by -0 has the
wrong sign; ``ops.addcdiv`` takes a small denominator for 0; ``ops.addcmul`` multiplies by ``value`` last; ``ops.lerp``
rounds its product; and none of the three takes bfloat16. Otherwise ``+ - * /``, float32 ``sqrt`` and casts are
exact, and :class:`DeviceOps`, for Ascend, is made of these. It rounds a multiply-add twice: one rounding would need
float64 or an instruction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import Tensor, ops

from hpcompat_mindspore import autograd
from hpcompat_mindspore.autograd import executor
from hpcompat_mindspore.mpi import progress
from hpcompat_mindspore.tensors import numpy_dtype

Array = np.ndarray[Any, Any]
Value = Any  # numpy.ndarray on the CPU, mindspore.Tensor on Ascend

# Elements worked on at once, so that what lies between two operations stays in the cache.
_BLOCK = 16384
_VECTOR = 32
_SMALLEST_NORMAL = 2.0**-126
_BITS_BELOW_FLOAT32 = np.int64((1 << 29) - 1)
_HALF_OF_FLOAT32 = np.int64(1 << 28)


class Ops(Protocol):
    """Operations on values of one dtype. None changes its arguments. [Note: rounding points]"""

    def negate(self, x: Value) -> Value: ...
    def multiply(self, x: Value, number: float) -> Value:
        """By a number in the dtype."""
        ...

    def scale(self, x: Value, factor: float) -> Value:
        """Multiply by a float32 number."""
        ...

    def divide(self, x: Value, divisor: float) -> Value: ...
    def add_number(self, x: Value, number: float) -> Value: ...
    def add(self, x: Value, other: Value, *, alpha: float) -> Value:
        """``x + alpha * other``"""
        ...

    def lerp(self, x: Value, end: Value, *, weight: float) -> Value:
        """``x + weight * (end - x)``, from the nearer end."""
        ...

    def addcmul(self, x: Value, left: Value, right: Value, *, value: float) -> Value:
        """``x + value * left * right``"""
        ...

    def addcdiv(self, x: Value, numerator: Value, denominator: Value, *, value: float) -> Value:
        """``x + value * numerator / denominator``"""
        ...

    def sqrt(self, x: Value) -> Value: ...
    def maximum(self, x: Value, other: Value) -> Value: ...


# Gives the new values of what is written, from all values in order.
Rule = Callable[..., tuple[Value, ...]]


class Arithmetic(Protocol):
    """Runs a rule over tensors of one dtype and one number of elements."""

    def update(self, written: Sequence[Tensor], read: Sequence[Tensor], rule: Rule) -> None:
        """Put ``rule(ops, *written, *read)`` into ``written``, in the memory that they have."""
        ...


# The CPU


def fused_multiply_add(left: Any, right: Array, addend: Array) -> Array:
    """``left * right + addend`` in float32, rounded once.

    In float64 the product is exact, and the sum is rounded to 53 bits. Rounding that to float32 is one rounding in
    effect unless the 53 bits lie halfway between two float32 numbers only because of the first: those are corrected.
    In float64 itself it is not fused.
    """
    if addend.dtype == np.float64:
        return left * right + addend  # type: ignore[no-any-return]
    product = np.multiply(left, right, dtype=np.float64)
    wide = addend.astype(np.float64)
    total = product + wide
    halfway = (total.view(np.int64) & _BITS_BELOW_FLOAT32) == _HALF_OF_FLOAT32
    halfway |= np.abs(total) < _SMALLEST_NORMAL  # a denormal float32 has fewer bits
    if halfway.any():
        where = np.flatnonzero(halfway)
        total[where] = _round_to_odd(total[where], product[where], wide[where])
    rounded: Array = total.astype(np.float32)
    return rounded


def _round_to_odd(total: Array, left: Array, right: Array) -> Array:
    """``left + right``, given its rounded value: if that is not exact, the neighbour towards zero with its last bit
    set, which no further rounding can mistake for a tie.
    """
    back = total - left
    error = (left - (total - back)) + (right - back)
    bits = total.view(np.int64)
    outwards = (error > 0) == (total > 0)
    is_even = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    odd: Array = np.where(is_even, np.where(outwards, bits + 1, bits - 1), bits).view(np.float64)
    return odd


class _Float:
    """float32 and float64: values are the arrays themselves."""

    is_narrow = False

    def load(self, array: Array) -> Array:
        return array

    def store(self, array: Array, value: Array) -> None:
        array[...] = value

    def round(self, value: Array) -> Array:
        return value


@functools.cache
def _float16_numbers() -> Array:
    """All of them, as float32, by their bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class _Float16(_Float):
    """Without numpy's casts to float16 and back, which take many times as long, most of all for denormals."""

    is_narrow = True

    def load(self, array: Array) -> Array:
        return _float16_numbers()[array.view(np.uint16)]

    def store(self, array: Array, value: Array) -> None:
        # Its exponent, moved to where float16 has it; infinity and NaN come out right by what is cut off.
        bits = (np.abs(value) * np.float32(2.0**-112)).view(np.uint32) >> np.uint32(13)
        bits &= np.uint32(0x7FFF)
        bits |= (value.view(np.uint32) >> np.uint32(16)) & np.uint32(0x8000)
        array.view(np.uint16)[...] = bits

    def round(self, value: Array) -> Array:
        size = np.abs(value)
        # Denormals are multiples of 2**-24, which is the unit of float32 between 0.5 and 1.
        denormal = np.copysign((size + np.float32(0.5)) - np.float32(0.5), value)
        bits = value.view(np.uint32)
        bits += ((bits >> np.uint32(13)) & np.uint32(1)) + np.uint32(0xFFF)
        bits &= np.uint32(0xFFFFE000)
        np.copyto(value, denormal, where=size < np.float32(2.0**-14))
        np.copyto(value, np.copysign(np.float32(np.inf), value), where=np.abs(value) > np.float32(65504))
        return value


class _BFloat16(_Float):
    """As integers, which is many times faster than numpy's casts of MindSpore's dtype.

    A NaN stays one: it comes from 16 bits, so the lower 16 are 0 and rounding adds nothing to the upper.
    """

    is_narrow = True

    def load(self, array: Array) -> Array:
        wide: Array = (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide

    def store(self, array: Array, value: Array) -> None:
        array.view(np.uint16)[...] = value.view(np.uint32) >> np.uint32(16)

    def round(self, value: Array) -> Array:
        bits = value.view(np.uint32)
        bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
        return value


def _float_of(dtype: np.dtype[Any]) -> _Float:
    if dtype == np.float16:
        return _Float16()
    if dtype == numpy_dtype(mindspore.bfloat16):
        return _BFloat16()
    if dtype in (np.float32, np.float64):
        return _Float()
    raise TypeError(f"expected a floating parameter, but got one of {dtype}; leave it out of the optimizer")


class HostOps:
    """:class:`Ops` on float32 arrays whose values have the dtype's bits (float64: of float64)."""

    def __init__(self, kind: _Float, *, num_vectorized: int) -> None:
        self._kind = kind
        self._round = kind.round
        # Of the elements of the arrays: the rest is left over.
        self._num_vectorized = num_vectorized

    def negate(self, x: Array) -> Array:
        return -x

    def multiply(self, x: Array, number: float) -> Array:
        return self._round(x * self._number(x, number))

    def scale(self, x: Array, factor: float) -> Array:
        return self._round(x * x.dtype.type(factor))

    def divide(self, x: Array, divisor: float) -> Array:
        return self._round(x / x.dtype.type(divisor))

    def add_number(self, x: Array, number: float) -> Array:
        return self._round(x + self._number(x, number))

    def add(self, x: Array, other: Array, *, alpha: float) -> Array:
        factor = self._number(x, alpha)
        total = self._round(fused_multiply_add(factor, other, x))
        if self._kind.is_narrow and self._num_vectorized < x.size:
            rest = slice(self._num_vectorized, None)
            total[rest] = self._round(x[rest] + self._round(factor * other[rest]))
        return total

    def lerp(self, x: Array, end: Array, *, weight: float) -> Array:
        factor, way = x.dtype.type(weight), end - x
        if abs(factor) < 0.5:
            return self._round(fused_multiply_add(factor, way, x))
        return self._round(fused_multiply_add(factor - x.dtype.type(1), way, end))

    def addcmul(self, x: Array, left: Array, right: Array, *, value: float) -> Array:
        return self._round(fused_multiply_add(x.dtype.type(value) * left, right, x))

    def addcdiv(self, x: Array, numerator: Array, denominator: Array, *, value: float) -> Array:
        return self._round(x + x.dtype.type(value) * numerator / denominator)

    def sqrt(self, x: Array) -> Array:
        return self._round(np.sqrt(x))

    def maximum(self, x: Array, other: Array) -> Array:
        return np.maximum(x, other)

    def _number(self, x: Array, number: float) -> Any:
        """``number`` in the dtype."""
        if not self._kind.is_narrow:
            return x.dtype.type(number)
        return self._round(np.array([number], np.float32))[0]


class HostArithmetic:
    """numpy on the memory of the tensors. See ``numpy on the CPU`` in :mod:`hpcompat_mindspore.tensors`."""

    def update(self, written: Sequence[Tensor], read: Sequence[Tensor], rule: Rule) -> None:
        arrays = [tensor.asnumpy() for tensor in (*written, *read)]
        flat = [array.reshape(-1) for array in arrays]
        numel = flat[0].size
        kind = _float_of(flat[0].dtype)
        num_vectorized = numel // _VECTOR * _VECTOR
        with np.errstate(all="ignore"):
            for start in range(0, numel, _BLOCK):
                block = slice(start, start + _BLOCK)
                host_ops = HostOps(kind, num_vectorized=num_vectorized - start)
                values = rule(host_ops, *(kind.load(array[block]) for array in flat))
                for array, value in zip(flat, values, strict=False):
                    kind.store(array[block], value)
        for tensor, array in zip(written, arrays, strict=False):
            if numel and array.ctypes.data != tensor.data_ptr():  # a view: numpy got a copy
                tensor.assign_value(Tensor.from_numpy(array))


# Ascend


class DeviceOps:
    """:class:`Ops` on float32 tensors, by functions that return new ones. Has not run on the hardware yet."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def _round(self, value: Tensor) -> Tensor:
        if self._dtype == mindspore.float32:
            return value
        return value.astype(self._dtype).astype(mindspore.float32)

    def negate(self, x: Tensor) -> Tensor:
        return -x

    def multiply(self, x: Tensor, number: float) -> Tensor:
        return self._round(x * self._round(_float32(number)))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._round(x * _float32(factor))

    def divide(self, x: Tensor, divisor: float) -> Tensor:
        return self._round(x / _float32(divisor))

    def add_number(self, x: Tensor, number: float) -> Tensor:
        return self._round(x + self._round(_float32(number)))

    def add(self, x: Tensor, other: Tensor, *, alpha: float) -> Tensor:
        return self._round(x + other * self._round(_float32(alpha)))

    def lerp(self, x: Tensor, end: Tensor, *, weight: float) -> Tensor:
        factor, way = _float32(weight), end - x
        if abs(weight) < 0.5:
            return self._round(x + way * factor)
        return self._round(end + way * (factor - 1.0))

    def addcmul(self, x: Tensor, left: Tensor, right: Tensor, *, value: float) -> Tensor:
        return self._round(x + left * _float32(value) * right)

    def addcdiv(self, x: Tensor, numerator: Tensor, denominator: Tensor, *, value: float) -> Tensor:
        return self._round(x + numerator * _float32(value) / denominator)

    def sqrt(self, x: Tensor) -> Tensor:
        return self._round(ops.sqrt(x))

    def maximum(self, x: Tensor, other: Tensor) -> Tensor:
        return ops.maximum(x, other)


def _float32(number: float) -> Tensor:
    return Tensor(np.array(number, np.float32))


class DeviceArithmetic:
    """Tensor operations. Has not run on the hardware yet; on the CPU it gives the bits of its own operations."""

    def update(self, written: Sequence[Tensor], read: Sequence[Tensor], rule: Rule) -> None:
        if written[0].size == 0:
            return
        device_ops = DeviceOps(written[0].dtype)
        with autograd.no_grad():
            values = rule(device_ops, *(tensor.astype(mindspore.float32) for tensor in (*written, *read)))
            for tensor, value in zip(written, values, strict=False):
                tensor.copy_(value.astype(tensor.dtype))


HOST = HostArithmetic()
DEVICE = DeviceArithmetic()


def is_host() -> bool:
    """Whether MindSpore computes on the CPU, where numpy sees the memory of its tensors."""
    return mindspore.get_context("device_target") == "CPU"  # type: ignore[no-any-return]


def arithmetic() -> Arithmetic:
    """That of the device that MindSpore computes on, after everything queued on it that may use the memory."""
    if not is_host():
        return DEVICE
    progress()
    executor.sync()
    return HOST
