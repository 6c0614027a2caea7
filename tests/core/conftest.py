"""The numpy reference in the place of a framework, for tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcompat_conformance import numpy_reference as ref


@pytest.fixture
def reference() -> Iterator[ref.NumpyBackend]:
    """``fully_shard`` takes modules of the reference."""
    with ref.registered() as backend:
        yield backend


@pytest.fixture
def rank(reference: ref.NumpyBackend) -> Iterator[ref.Rank]:
    """Rank 0 of two, without data: for schedules."""
    with ref.DryWorld(2).rank() as current:
        yield current
