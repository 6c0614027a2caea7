"""What a case may demand. Every failure shows both values, and of arrays the worst element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpcompat_conformance.framework import Array


class CheckFailed(AssertionError):
    """The implementation did something else than the clause says. ``values`` are those that were compared: by
    ``"expected"`` and ``"actual"``, where there were two."""

    def __init__(self, message: str, *, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = dict(values or {})


def check(condition: bool, message: str) -> None:
    """``message`` says what was expected and what was there."""
    if not condition:
        raise CheckFailed(message)


def check_equal(actual: Any, expected: Any, *, what: str) -> None:
    """``actual == expected``; long lists are shown one element a line with the first difference marked."""
    if actual == expected:
        return
    values = {"expected": expected, "actual": actual}
    if isinstance(actual, list) and isinstance(expected, list):
        table = _side_by_side(expected, actual)
        raise CheckFailed(f"{what}: expected on the left, but got on the right\n{table}", values=values)
    raise CheckFailed(f"{what}: expected {expected!r}, but got {actual!r}", values=values)


def check_array(actual: Array | None, expected: Array, *, what: str, ulps: int = 0) -> None:
    """Equal shape, dtype and values, up to ``ulps`` units in the last place of the expected dtype."""
    if actual is None:
        raise CheckFailed(f"{what}: expected an array of shape {expected.shape}, but got none")
    check_equal(
        (actual.shape, str(actual.dtype)), (expected.shape, str(expected.dtype)), what=f"{what}: shape and dtype"
    )
    distance = ulp_distance(actual, expected)
    if distance.size == 0 or distance.max() <= ulps:
        return
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    raise CheckFailed(
        f"{what}: {int((distance > ulps).sum())} of {distance.size} elements differ by more than {ulps} ULP; "
        f"worst at {tuple(map(int, worst))}: expected {expected[worst]!r}, but got {actual[worst]!r} "
        f"({int(distance[worst])} ULP)",
        values={"expected": expected, "actual": actual},
    )


def check_arrays(
    actual: Mapping[str, Array | None], expected: Mapping[str, Array], *, what: str, ulps: int = 0
) -> None:
    """`check_array` for each name; the names must be the same."""
    check_equal(sorted(actual), sorted(expected), what=f"{what}: names")
    for name, array in expected.items():
        check_array(actual[name], array, what=f"{what} of {name}", ulps=ulps)


def check_close(
    actual: Mapping[str, Array | None], expected: Mapping[str, Array], *, what: str, tolerance: float
) -> None:
    """Equal names and shapes; no element further off than ``tolerance`` times the largest one of its array."""
    check_equal(sorted(actual), sorted(expected), what=f"{what}: names")
    for name, array in expected.items():
        found = actual[name]
        if found is None:
            raise CheckFailed(f"{what} of {name}: expected an array of shape {array.shape}, but got none")
        check_equal(found.shape, array.shape, what=f"{what} of {name}: shape")
        error = np.abs(found.astype(np.float64) - array.astype(np.float64))
        allowed = tolerance * float(np.abs(array).max(initial=0.0))
        if not (error <= allowed).all():
            worst = np.unravel_index(int(np.nan_to_num(error, nan=np.inf).argmax()), error.shape)
            raise CheckFailed(
                f"{what} of {name}: expected within {allowed:.3g}; worst at {tuple(map(int, worst))}: "
                f"expected {array[worst]!r}, but got {found[worst]!r}{_ulps_apart(array[worst], found[worst])}",
                values={"expected": array, "actual": found},
            )


@contextmanager
def check_raises(kind: type[Exception] | tuple[type[Exception], ...], *, containing: str) -> Iterator[None]:
    """The block must raise an exception of the kind whose text contains the words, upper or lower case."""
    try:
        yield
    except kind as error:
        if containing.lower() not in str(error).lower():
            raise CheckFailed(f"expected an error that says {containing!r}, but got {error!r}") from error
    else:
        raise CheckFailed(f"expected an error that says {containing!r}, but got none")


def ulp_distance(left: Array, right: Array) -> Array:
    """How many floating-point numbers lie between two arrays of one dtype, element by element; int64. Unequal NaNs and
    infinities are as far apart as can be."""
    if not np.issubdtype(left.dtype, np.floating):
        return np.abs(left.astype(np.int64) - right.astype(np.int64))
    finite = np.isfinite(left) & np.isfinite(right)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    distance = np.abs(_ordered(left) - _ordered(right))
    return np.where(same, 0, np.where(finite, distance, np.iinfo(np.int64).max))


def _ulps_apart(left: Any, right: Any) -> str:
    """In words, if the two have a dtype in common."""
    same = left.dtype == right.dtype and np.issubdtype(left.dtype, np.floating)
    return f" ({int(ulp_distance(np.array(left), np.array(right)))} ULP)" if same else ""


def _ordered(array: Array) -> Array:
    """Integers in the order of the floating-point numbers, with consecutive numbers one apart. Both zeros are 0."""
    bits = array.astype(array.dtype, copy=True).view(f"i{array.dtype.itemsize}").astype(np.int64)
    lowest = np.int64(-(2 ** (8 * array.dtype.itemsize - 1)))
    return np.where(bits < 0, lowest - bits, bits)


def _side_by_side(left: list[Any], right: list[Any]) -> str:
    rows = [(str(a), str(b)) for a, b in zip(left, right, strict=False)]
    rows += [(str(a), "(nothing)") for a in left[len(right) :]]
    rows += [("(nothing)", str(b)) for b in right[len(left) :]]
    width = max(len(a) for a, _ in rows)
    return "\n".join(f"  {a:<{width}}  {'  ' if a == b else '!='}  {b}" for a, b in rows)
