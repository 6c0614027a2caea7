"""A rank that dies or hangs in a step: the others end, with an error that names the collective and the unit."""

from __future__ import annotations

from pathlib import Path

import pytest

import killed_rank
from hpcompat_torch import collectives

pytestmark = pytest.mark.thorough

HERE = {"backend": "torch", "model": "neutral_models", "models": Path(__file__).parent}


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=EXHAUSTIVE), "optimizer"])
def test_a_killed_rank(where: str) -> None:
    killed_rank.check_killed(where, launcher_says="Signal 9 (SIGKILL) received", **HERE)


@pytest.mark.parametrize("where", ["backward", pytest.param("optimizer", marks=EXHAUSTIVE)])
def test_a_rank_that_hangs(where: str) -> None:
    killed_rank.check_hung(where, **HERE)


def test_only_errors_of_the_transport_are_explained() -> None:
    killed_rank.check_only_errors_of_the_transport(collectives.explain)
