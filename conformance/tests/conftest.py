"""Fixtures for the suite's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcompat_conformance.launcher import SUBPROCESSES, Launcher
from hpcompat_conformance.mpirun import Mpirun
from hpcompat_conformance.pytest_plugin import pool as pool

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
