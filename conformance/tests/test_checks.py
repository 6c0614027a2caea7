"""What cases demand, and the numbers they demand it of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcompat_conformance.checks import (
    CheckFailed,
    check_array,
    check_arrays,
    check_close,
    check_equal,
    check_raises,
    ulp_distance,
)
from hpcompat_conformance.framework import Collective
from hpcompat_conformance.run_context import padded_elements, steps
from hpcompat_conformance.values import batch_values, bfloat16_exact, parameter_values

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, st.integers(0, 5))
def test_ulp_distance_counts_steps_to_the_next_number(value: float, count: int) -> None:
    start = end = np.array([value], dtype=np.float32)
    for _ in range(count):
        end = np.nextafter(end, np.float32(np.inf))
    if np.isfinite(end).all():
        assert ulp_distance(start, end).tolist() == [count]
        assert ulp_distance(end, start).tolist() == [count]


def test_ulp_distance_of_special_values() -> None:
    left = np.array([0.0, np.nan, np.inf, np.inf, np.nan], dtype=np.float32)
    right = np.array([-0.0, np.nan, np.inf, -np.inf, 1.0], dtype=np.float32)
    far = np.iinfo(np.int64).max
    assert ulp_distance(left, right).tolist() == [0, 0, 0, far, far]
    assert ulp_distance(np.array([3]), np.array([5])).tolist() == [2]


def test_check_array_shows_the_worst_element() -> None:
    expected = np.ones((2, 3), dtype=np.float32)
    actual = expected.copy()
    actual[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    check_array(actual, expected, what="w", ulps=1)
    complaint = r"w: 1 of 6 elements differ by more than 0 ULP; worst at \(1, 2\).*\(1 ULP\)"
    with pytest.raises(CheckFailed, match=complaint):
        check_array(actual, expected, what="w")


@pytest.mark.parametrize(
    "actual", [None, np.ones(3, dtype=np.float64), np.ones((1, 3), dtype=np.float32), np.full(3, np.nan, np.float32)]
)
def test_check_array_refuses_other_shapes_dtypes_and_nothing(actual: np.ndarray | None) -> None:
    with pytest.raises(CheckFailed):
        check_array(actual, np.ones(3, dtype=np.float32), what="w", ulps=100)


def test_check_arrays_and_check_close_want_the_same_names() -> None:
    one = np.ones(1, dtype=np.float32)
    for other in ({}, {"a": one, "b": one}):
        with pytest.raises(CheckFailed, match="names"):
            check_arrays(other, {"a": one}, what="w")
        with pytest.raises(CheckFailed, match="names"):
            check_close(other, {"a": one}, what="w", tolerance=1.0)


def test_check_close_is_relative_to_the_largest_element() -> None:
    expected = {"a": np.array([100.0, 1.0], dtype=np.float32)}
    check_close({"a": np.array([100.0, 1.9], dtype=np.float32)}, expected, what="w", tolerance=0.01)
    for wrong in (2.1, np.nan, np.inf):
        with pytest.raises(CheckFailed, match=r"w of a: expected within 1; worst at \(1,\)"):
            check_close({"a": np.array([100.0, wrong], dtype=np.float32)}, expected, what="w", tolerance=0.01)
    with pytest.raises(CheckFailed, match="but got none"):
        check_close({"a": None}, expected, what="w", tolerance=1.0)


def test_check_equal_marks_the_first_difference_of_lists() -> None:
    check_equal([1, 2], [1, 2], what="w")
    with pytest.raises(CheckFailed) as caught:
        check_equal(["gather", "reduce", "more"], ["gather", "keep"], what="w")
    lines = [line.split() for line in str(caught.value).splitlines()[1:]]
    assert lines == [["gather", "gather"], ["keep", "!=", "reduce"], ["(nothing)", "!=", "more"]]


def test_check_raises_wants_the_kind_and_the_words() -> None:
    with check_raises(ValueError, containing="NOT so"):
        raise ValueError("this is not so")
    with pytest.raises(CheckFailed, match="but got ValueError"), check_raises(ValueError, containing="so"):
        raise ValueError("no")
    with pytest.raises(CheckFailed, match="but got none"), check_raises(ValueError, containing="so"):
        pass
    with pytest.raises(KeyError), check_raises(ValueError, containing="so"):
        raise KeyError("so")


def test_values_are_stable_and_differ_by_name_rank_and_step() -> None:
    weight = parameter_values("layers.0.weight", (3, 4), seed=1)
    assert np.array_equal(weight, parameter_values("layers.0.weight", (3, 4), seed=1))
    assert set(np.unique(weight)) <= {-1.0, 0.0, 1.0}
    assert not np.array_equal(weight, parameter_values("layers.1.weight", (3, 4), seed=1))
    assert not np.array_equal(weight, parameter_values("layers.0.weight", (3, 4), seed=2))
    batches = {batch_values((3, 4), rank=rank, step=step, seed=1).tobytes() for rank in (0, 1) for step in (0, 1)}
    assert len(batches) == 4


def test_bfloat16_exact_looks_at_every_element() -> None:
    assert bfloat16_exact(np.array([1.5, -256.0, 2.0**100], dtype=np.float32))
    assert not bfloat16_exact(np.array([1.5, 257.0], dtype=np.float32))


def test_steps_and_padding() -> None:
    words = ["gather 0 over 4", "gather 1 over 2", "reduce 0 over 4"]
    assert steps("gather 0, gather 1 over 2 | reduce 0", over=4) == words
    assert steps("", over=4) == []
    assert padded_elements([(7, 3), (7,), (1, 2)], 4) == 8 * 3 + 8 + 4 * 2
    assert Collective("all_gather", (0, 2), 8, "float32").group_size == 2
