"""A rank that dies or hangs in a step: the others end, with an error that names the collective and the unit."""

from __future__ import annotations

from pathlib import Path

import pytest

import killed_rank
from hpcompat import CollectiveError
from hpcompat_mindspore import collectives

MODELS = Path(__file__).parent
LAUNCHER_SAYS = "signal 9 (Killed)"


@pytest.mark.parametrize("where", killed_rank.WHERE)
def test_a_killed_rank(where: str) -> None:
    status, stderr = killed_rank.run("--model=ms_neutral", "--where", where, backend="mindspore", models=MODELS)
    assert status != 0
    killed_rank.check_named(stderr, where=where)
    assert LAUNCHER_SAYS in stderr


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_rank_that_hangs(where: str) -> None:
    """Nothing ends it or tells the others; they wait as long as they were told to."""
    # One way each to say how long.
    options, environ = (["--timeout=5"], {}) if where == "backward" else ([], {"HPCOMPAT_TIMEOUT": "5"})
    status, stderr = killed_rank.run(
        "--model=ms_neutral", "--where", where, "--hang", *options, backend="mindspore", models=MODELS, environ=environ
    )
    assert status != 0
    killed_rank.check_named(stderr, where=where)
    assert "CollectiveError: expected every rank in the" in stderr


class OwnError(RuntimeError):
    """Such as a custom collective may raise."""


def test_only_errors_of_the_transport_are_explained() -> None:
    collectives.explain(OwnError("mine"), collective="all-gather", owner=None)
    cause = RuntimeError("gone")
    with pytest.raises(CollectiveError) as caught:
        collectives.explain(cause, collective="all-gather", owner=None)
    assert caught.value.__cause__ is cause
