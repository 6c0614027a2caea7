"""Fixtures for the suite's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcompat_conformance.document import Document
from hpcompat_conformance.launcher import SUBPROCESSES, Launcher
from hpcompat_conformance.mpirun import Mpirun
from hpcompat_conformance.pytest_plugin import pool as pool
from hpcompat_conformance.results import Origin, Result, Run

STAND_IN = Path(__file__).with_name("mpirun_stand_in.py")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An executable that does without MPI what a pool needs of mpirun."""
    script = tmp_path_factory.mktemp("bin") / "mpirun"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module", params=["subprocesses", "mpirun"])
def launcher(request: pytest.FixtureRequest, stand_in: str) -> Launcher:
    """Each way to start the processes of a pool."""
    return SUBPROCESSES if request.param == "subprocesses" else Mpirun(executable=stand_in)


TRACEBACK = """cases on 2 ranks: failed
--- rank 1 raised CheckFailed:
Traceback (most recent call last):
  File "/home/me/venv/lib/python3.11/site-packages/hpcompat_conformance/cases/reduce.py", line 7, in a_case
    check_array(actual, expected, what="<w> & more")
CheckFailed: <w> & more: 1 of 6 elements differ by more than 0 ULP; worst at (1, 2): expected 1.0, but got 2.0 (8 ULP)
"""
HEADLINE = TRACEBACK.splitlines()[-1]


def finished_run(name: str, *results: Result) -> Run:
    """A run as the command line makes it."""
    origin = Origin(
        "2026.12", 2026, (1, 2), "2026-12-01T10:00Z", "Linux x86_64, 2 cores, Python 3.11.2", f"hpcompat --impl {name}"
    )
    return Run(name, {"torch": "2.13.0"}, results, 12.5, origin)


@pytest.fixture
def outcome() -> Document:
    """Two implementations: of one everything passes, of the other there is each kind of result."""
    link = "https://example.org/gap"
    good = [Result(f"m.{clause}", clause, 2, "pass", 0.25) for clause in ("ACC-01", "ACC-02", "ACC-03", "FUS-01")]
    bad = [
        Result("m.one", "ACC-01", 1, "pass", 0.1),
        Result("m.one", "ACC-01", 2, "fail", 0.2, TRACEBACK, HEADLINE),
        Result("m.two", "ACC-02", 2, "xfail", 0.2, f"a known gap ({link})\n{TRACEBACK}", HEADLINE, "a known gap", link),
        Result("m.three", "ACC-03", 1, "pass", 0.2),
        Result("m.four", "FUS-01", 2, "skip", 0.1, "no fully_shard.comm_fusion"),
        Result("m.five", "RED-01", 2, "timeout", 60.0, "no answer | within 60 s\nstacks", "no answer | within 60 s"),
        Result("m.six", "RED-02", 2, "error", 1.0, "a worker died \x1b", "a worker died \x1b"),
        Result("m.seven", "SCH-01", 2, "waived", 1.0, f"waived\n{TRACEBACK}", HEADLINE, "until the next release"),
        Result("m.eight", "SCH-02", 2, "xpass", 1.0, "expected to fail, but it passes: remove the entry"),
    ]
    return Document([finished_run("good-one", *good), finished_run("bad-one", *bad)])
