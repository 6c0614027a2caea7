"""Tensors as bits: read from safetensors files, compared element by element, whatever wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from hpcompat.cli.errors import CommandError

# Of the names in the files: the same number of bits, and how numpy reads the values; it does not know bfloat16.
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
VALUES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
    "BOOL": "<u1",
}

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """``bits``: unsigned integers of the dtype's width, of the tensor's shape."""

    dtype: str
    bits: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


@dataclass(frozen=True)
class Element:
    """The first element that differs."""

    index: tuple[int, ...]
    values: tuple[str, str]
    bits: tuple[str, str]
    ulp: int


@dataclass(frozen=True)
class Difference:
    """``max_ulp`` and ``max_abs`` are of all elements; the others of those beyond the limit."""

    num_elements: int
    num_differing: int
    max_ulp: int
    max_abs: float
    first: Element | None


def read(path: Path) -> Tensor:
    """The only tensor of a file."""
    try:
        ((_, entry),) = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError, ValueError) as error:
        raise CommandError(f"expected a safetensors file with one tensor, but got {str(path)!r}: {error}") from error
    dtype = entry["dtype"]
    if dtype not in VALUES:
        raise CommandError(f"expected a dtype of {', '.join(VALUES)}, but got {dtype} in {str(path)!r}")
    bits: Array = np.frombuffer(entry["data"], UNSIGNED[np.dtype(VALUES[dtype]).itemsize])
    return Tensor(dtype, bits.reshape(tuple(entry["shape"])))


def number(value: float, dtype: str = "float64") -> Tensor:
    """A Python number that ``dtype`` can hold, as a tensor of one element."""
    if dtype == "bfloat16":
        return Tensor("BF16", (np.array(value, "<f4").view("<u4") >> np.uint32(16)).astype("<u2"))
    name = f"F{dtype.removeprefix('float')}"
    if name not in VALUES:
        raise CommandError(f"expected a loss of a floating dtype, but got one of {dtype!r}")
    array = np.array(value, VALUES[name])
    return Tensor(name, array.view(UNSIGNED[array.itemsize]))


def compare(one: Tensor, other: Tensor, *, limit_ulp: int) -> Difference:
    """How two tensors of one dtype and shape differ.

    The distance in ULP counts the values of the dtype from one to the other. Every pattern of bits is such a value: 0.0
    is next to -0.0, and a NaN beyond infinity, on the side of its sign. So the distance is 0 for equal bits only.
    """
    keys, others = _ordered(one), _ordered(other)
    distances = np.where(keys > others, keys - others, others - keys)
    differing = distances > limit_ulp
    max_ulp = int(distances.max(initial=0))
    first = None
    if differing.any():
        place = int(np.argmax(differing))
        first = _element(one, other, place, int(distances.reshape(-1)[place]))
    max_abs = _largest(one, other) if max_ulp else 0.0
    return Difference(distances.size, int(differing.sum()), max_ulp, max_abs, first)


def _ordered(tensor: Tensor) -> Array:
    """Unsigned integers in the order of the values."""
    bits, kind = tensor.bits, tensor.dtype
    if kind in ("U8", "BOOL"):
        return bits
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    flipped: Array = bits ^ sign
    if kind.startswith("I"):
        return flipped
    return np.where(bits & sign, ~bits, flipped)


def _values(tensor: Tensor) -> Array:
    """As float64, which holds all of them but large integers."""
    if tensor.dtype == "BF16":
        wide: Array = (tensor.bits.astype("<u4") << np.uint32(16)).view("<f4")
    else:
        wide = tensor.bits.view(VALUES[tensor.dtype])
    with np.errstate(invalid="ignore"):
        return wide.astype(np.float64)


def _largest(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference; of an infinity, infinite; a NaN on one side only counts as such, too."""
    with np.errstate(invalid="ignore", over="ignore"):
        mine, theirs = _values(one), _values(other)
        distances = np.abs(mine - theirs)
    is_same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    distances = np.where(is_same, 0.0, np.where(np.isnan(distances), math.inf, distances))
    return float(distances.max(initial=0.0))


def _element(one: Tensor, other: Tensor, place: int, ulp: int) -> Element:
    index = tuple(int(position) for position in np.unravel_index(place, one.shape))
    sides = (one, other)
    digits = 2 * one.bits.dtype.itemsize
    return Element(
        index=index,
        values=tuple(repr(float(_values(side).reshape(-1)[place])) for side in sides),  # type: ignore[arg-type]
        bits=tuple(f"0x{int(side.bits.reshape(-1)[place]):0{digits}x}" for side in sides),  # type: ignore[arg-type]
        ulp=ulp,
    )
