"""Where the elements of a parameter go: chunks as torch.chunk cuts them, padding, offsets."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcompat.core.layout import ShardLayout, align_up, contiguous_strides, offsets

LAYOUTS = st.builds(
    lambda shape, dim, world_size: ShardLayout(tuple(shape), dim % len(shape), world_size),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(1, 9),
)


def torch_chunk(size: int, num_chunks: int) -> list[int]:
    """Lengths of what ``torch.chunk`` returns: equal but for the last, and fewer than asked for if that is enough."""
    lengths = []
    step = (size + num_chunks - 1) // num_chunks
    while size > 0:
        lengths.append(min(step, size))
        size -= lengths[-1]
    return lengths


@pytest.mark.parametrize(
    ("rows", "world_size", "lengths"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (5, 4, [2, 2, 1, 0]),
        (3, 2, [2, 1]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (6, 4, [2, 2, 2, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (5, 1, [5]),
        (0, 2, [0, 0]),
    ],
)
def test_lengths_that_people_meet(rows: int, world_size: int, lengths: list[int]) -> None:
    layout = ShardLayout((rows, 3), 0, world_size)
    assert [layout.length(rank) for rank in range(world_size)] == lengths


@given(LAYOUTS)
def test_chunks_are_those_of_torch_chunk_and_the_rest_is_empty(layout: ShardLayout) -> None:
    lengths = [layout.length(rank) for rank in range(layout.world_size)]
    expected = torch_chunk(layout.shape[layout.dim], layout.world_size)
    assert lengths == expected + [0] * (layout.world_size - len(expected))
    assert layout.chunk_size == lengths[0] == max(lengths)
    assert layout.is_even == (len(set(lengths)) == 1)


@given(LAYOUTS)
def test_chunks_cover_the_parameter_once_and_in_order(layout: ShardLayout) -> None:
    whole = np.arange(prod(layout.shape)).reshape(layout.shape)
    chunks = [
        whole.take(range(layout.start(rank), layout.start(rank) + layout.length(rank)), axis=layout.dim)
        for rank in range(layout.world_size)
    ]
    assert [chunk.shape for chunk in chunks] == [layout.shard_shape(rank) for rank in range(layout.world_size)]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=layout.dim), whole)


@given(LAYOUTS)
def test_every_rank_sends_the_padded_chunk(layout: ShardLayout) -> None:
    assert layout.padded_shape == layout.shard_shape(0)
    assert layout.padded_numel == prod(layout.padded_shape)
    padding = layout.padded_numel * layout.world_size - prod(layout.shape)
    assert padding >= 0
    assert (padding == 0) == (layout.is_even or prod(layout.padded_shape) == 0)


@given(LAYOUTS.filter(lambda layout: layout.dim == 0))
def test_rows_arrive_contiguously_with_the_padding_behind(layout: ShardLayout) -> None:
    whole = np.arange(1, prod(layout.shape) + 1).reshape(layout.shape)
    gathered = []
    for rank in range(layout.world_size):
        padded = np.zeros(layout.padded_shape, whole.dtype)
        padded[: layout.length(rank)] = whole[layout.start(rank) :][: layout.length(rank)]
        gathered.append(padded.reshape(-1))
    flat = np.concatenate(gathered)
    np.testing.assert_array_equal(flat[: whole.size], whole.reshape(-1))
    assert not flat[whole.size :].any()


@given(st.lists(st.integers(0, 50), max_size=8), st.sampled_from([1, 2, 16, 64]))
def test_pieces_are_aligned_and_as_close_as_that_allows(sizes: list[int], alignment: int) -> None:
    starts, end = offsets(sizes, alignment=alignment)
    previous_end = 0
    for start, size in zip(starts, sizes, strict=True):
        assert start % alignment == 0
        assert previous_end <= start < previous_end + alignment
        previous_end = start + size
    assert end == previous_end


def test_offsets_of_a_flat_buffer() -> None:
    assert offsets([6, 0, 4]) == ([0, 6, 6], 10)
    assert offsets([6, 1, 4], alignment=4) == ([0, 8, 12], 16)
    assert offsets([]) == ([], 0)


@pytest.mark.parametrize(("offset", "aligned"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_align_up(offset: int, aligned: int) -> None:
    assert align_up(offset, 64) == aligned


@given(st.lists(st.integers(1, 5), max_size=4))
def test_strides_are_row_major(shape: list[int]) -> None:
    array = np.empty(shape, np.int8)
    assert contiguous_strides(shape) == array.strides


@pytest.mark.parametrize(("shape", "strides"), [((0, 5), (5, 1)), ((3, 0, 2), (2, 2, 1)), ((0,), (1,)), ((), ())])
def test_strides_of_empty_shards_are_those_of_torch(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == strides
