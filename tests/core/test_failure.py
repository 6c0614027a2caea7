"""Collectives that fail: what the error says, and the last words of a rank that its launcher ends."""

from __future__ import annotations

import logging
import pickle
import signal
from datetime import timedelta

import pytest

import hpcompat
from hpcompat import distributed
from hpcompat.core import failure
from hpcompat_conformance import numpy_reference as ref
from training import Stack, batch, initialize, train, units, wrap

pytestmark = pytest.mark.usefixtures("reference")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_has_failed", False)
    monkeypatch.setattr(failure, "_installed_in", None)


@pytest.fixture
def model(rank: ref.Rank) -> ref.Module:
    """After one step, as rank 0 of two."""
    made = wrap(initialize(Stack()))
    train(made, batch(0))
    return made


def test_the_error_names_what_failed(model: ref.Module) -> None:
    group = list(units(model))[1].groups[0]
    error = failure.failed(RuntimeError("Connection closed."), collective="all-gather", owner=group)
    assert isinstance(error, RuntimeError)
    assert (error.collective, error.unit) == ("all-gather", group.fqn)
    names = ", ".join(map(repr, group.tensors.names))
    expected = (
        f"expected every rank in the all-gather of unit {group.fqn!r} (parameter group 1 of 1: {names}), but got on "
        "rank 0 of 2: Connection closed. Another rank has ended"
    )
    assert str(error).startswith(expected), error
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.collective, copy.unit) == (str(error), error.collective, error.unit)


def test_the_root_has_a_name(model: ref.Module) -> None:
    group = list(units(model))[1].groups[0]
    group.fqn = ""
    error = failure.failed(RuntimeError(), collective="all-reduce", owner=group)
    assert "the all-reduce of the root unit (" in str(error)


def test_calls_without_a_unit_are_named() -> None:
    cause = RuntimeError("gone")
    told = "expected every rank in a barrier, but got: gone"
    with pytest.raises(hpcompat.CollectiveError, match=told) as caught, failure.naming("a barrier"):
        raise cause
    assert caught.value.__cause__ is cause
    assert caught.value.unit is None


@pytest.mark.parametrize("error", [ValueError("of the caller"), hpcompat.CollectiveError("the unit's")])
def test_other_errors_stay(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, failure.naming("a barrier"):
        raise error
    assert caught.value is error


def test_last_words_name_the_last_collective(
    model: ref.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(failure.os, "kill", lambda process, number: ended.append(number))
    monkeypatch.setattr(failure.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(failure, "_installed_in", failure.os.getpid())
    root, unit = list(units(model))[:2]
    monkeypatch.setattr(failure, "_roots", [root])
    collective, group = root.comm_ctx.last_begun
    with caplog.at_level(logging.ERROR, logger="hpcompat"):
        failure._say_last_words(signal.SIGTERM, None)
        unit.groups[0].unshard()
        failure._say_last_words(signal.SIGTERM, None)
        failure.failed(RuntimeError(), collective="all-gather", owner=group)
        failure._say_last_words(signal.SIGTERM, None)
    idle, waiting = caplog.messages
    assert f"rank 0 of 2 was told to end (SIGTERM) in or after the {collective} of {failure.describe(group)}." in idle
    assert f"(SIGTERM) in the all-gather of {failure.describe(unit.groups[0])}." in waiting
    assert ended == [signal.SIGTERM] * 3, "ends as it would have"


def test_a_handler_of_the_script_stays(rank: ref.Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    set_by_us: list[object] = []
    for present, expected in ((signal.SIG_IGN, []), (signal.SIG_DFL, [failure._say_last_words])):
        monkeypatch.setattr(failure.signal, "getsignal", lambda number, present=present: present)
        monkeypatch.setattr(failure.signal, "signal", lambda number, handler: set_by_us.append(handler))
        train(wrap(initialize(Stack())), batch(0))
        assert set_by_us == expected


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_wrong_timeout_in_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCOMPAT_TIMEOUT", text)
    with pytest.raises(
        ValueError, match=f"expected HPCOMPAT_TIMEOUT to be a number of seconds above 0, but got '{text}'"
    ):
        hpcompat.init_process_group()


def test_the_timeout_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCOMPAT_TIMEOUT", raising=False)
    assert distributed.timeout_from_environment() is None
    monkeypatch.setenv("HPCOMPAT_TIMEOUT", "2.5")
    assert distributed.timeout_from_environment() == timedelta(seconds=2.5)


def test_a_wrong_timeout() -> None:
    with pytest.raises(TypeError, match=r"expected timeout to be a datetime\.timedelta, but got 30"):
        hpcompat.init_process_group(timeout=30)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a timeout above 0, but got 0:00:00"):
        hpcompat.init_process_group(timeout=timedelta(0))
