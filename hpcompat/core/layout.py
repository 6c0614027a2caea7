"""Where the elements of a parameter go: chunks, padding and offsets. Integers only, no tensors.

[Note: padding]
A parameter sharded on dim 0 is cut as ``torch.chunk`` cuts: every rank holds ``ceil(rows / world_size)`` rows except
the last ones, which may hold fewer or none. Each rank stores its chunk padded to the size of chunk 0, so that every
rank sends the same number of elements and padding never travels as a special case. Because only trailing chunks are
short, the gathered buffer holds the parameter's elements contiguously, followed by the padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hpcompat.errors import UserError
from hpcompat.placement import is_shard


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def align_up(offset: int, alignment: int) -> int:
    return ceil_div(offset, alignment) * alignment


@dataclass(frozen=True)
class ShardLayout:
    """How one parameter of ``shape`` is cut along ``dim`` over ``world_size`` ranks."""

    shape: tuple[int, ...]
    dim: int
    world_size: int

    @property
    def chunk_size(self) -> int:
        """Length along ``dim`` of a full chunk; chunk 0 always has it."""
        return ceil_div(self.shape[self.dim], self.world_size)

    def start(self, rank: int) -> int:
        """First index along ``dim`` that ``rank`` holds (the end of the dim if it holds none)."""
        return min(rank * self.chunk_size, self.shape[self.dim])

    def length(self, rank: int) -> int:
        """Length along ``dim`` of what ``rank`` holds; 0 for an empty shard."""
        return min((rank + 1) * self.chunk_size, self.shape[self.dim]) - self.start(rank)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``; every other dim keeps its global size even when the shard is empty."""
        return self._with_length(self.length(rank))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return self._with_length(self.chunk_size)

    @property
    def padded_numel(self) -> int:
        return prod(self.padded_shape)

    @property
    def is_even(self) -> bool:
        return self.shape[self.dim] % self.world_size == 0

    def check_even(self, name: str) -> None:
        """
        Raises:
            NotImplementedError: cut along another dim than the first into chunks of several lengths.
        """
        if self.dim > 0 and not self.is_even:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {self.dim}, but got {name!r} of shape {self.shape} "
                f"(world size: {self.world_size}); shard it on dim 0, where any size works"
            )

    def _with_length(self, length: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def shard_dim(placement: Any, *, name: str, shape: Sequence[int]) -> int:
    """The dim along which parameter ``name`` is cut, not negative; the first where there is no placement.

    Raises:
        UserError: not a ``Shard``, or one along a dim that the parameter does not have.
    """
    if placement is None:
        return 0
    if not is_shard(placement):
        raise UserError(f"expected a Shard placement for parameter {name!r}, but got {placement!r}")
    dim: int = placement.dim
    num_dims = len(shape)
    if not -num_dims <= dim < num_dims:
        raise UserError(
            f"Shard dim {dim} is invalid for {num_dims}D tensor: expected a dim from {-num_dims} to {num_dims - 1}, "
            f"but got it for parameter {name!r} of shape {tuple(shape)}"
        )
    return dim % num_dims


def offsets(sizes: Iterable[int], *, alignment: int = 1) -> tuple[list[int], int]:
    """Start of each piece when pieces of ``sizes`` are laid out one after another, and the total length."""
    starts: list[int] = []
    end = 0
    for size in sizes:
        end = align_up(end, alignment)
        starts.append(end)
        end += size
    return starts, end


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; a dim of size 0 counts as 1, as torch does."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
