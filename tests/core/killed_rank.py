"""A rank that is killed, or stops coming, in the middle of a step: the other one must end with an error.

A script for two ranks, which :func:`run` starts as a user does:

    hpcompat launch -n 2 --backend torch tests/core/killed_rank.py --model neutral_models --where forward
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcompat

WHERE = ("forward", "backward", "optimizer")
HANG_SECONDS = 300
WHOLE_STEPS = 2
# What the other rank may wait in, by where this one leaves: backward is over when the optimizer steps.
WAITS_IN = {
    "forward": "all-gather of unit '0'|(all-gather|reduce-scatter) of the root unit",
    "backward": "(all-gather|reduce-scatter) of (unit '0'|the root unit)",
    "optimizer": "all-gather of the root unit",
}


def run(*arguments: str, backend: str, models: Path, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """The launcher's exit code and what it and the ranks wrote to stderr. Ranks that hang say where."""
    launch = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", "2", "--backend", backend]
    done = subprocess.run(
        [*launch, __file__, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(models), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=2 * HANG_SECONDS,
        check=False,
    )
    return done.returncode, done.stderr


def check_named(stderr: str, *, where: str) -> None:
    """One line of rank 0 says which collective of which unit, and which parameters."""
    told = [line for line in stderr.splitlines() if "rank 0 of 2" in line]
    assert told, stderr
    expected = rf"the ({WAITS_IN[where]}) \(parameter group 1 of 1: '[01]\.weight', '[01]\.bias'\)"
    assert any(re.search(expected, line) for line in told), stderr


def check_killed(where: str, *, model: str, backend: str, models: Path, launcher_says: str) -> None:
    status, stderr = run("--model", model, "--where", where, backend=backend, models=models)
    assert status != 0
    check_named(stderr, where=where)
    assert launcher_says in stderr


def check_hung(where: str, *, model: str, backend: str, models: Path) -> None:
    """Nothing ends the rank or tells the others; they wait as long as they were told to."""
    # One way each to say how long.
    options, environ = (["--timeout=5"], {}) if where == "backward" else ([], {"HPCOMPAT_TIMEOUT": "5"})
    arguments = ["--model", model, "--where", where, "--hang", *options]
    status, stderr = run(*arguments, backend=backend, models=models, environ=environ)
    assert status != 0
    check_named(stderr, where=where)
    assert "CollectiveError: expected every rank in the" in stderr


class OwnError(RuntimeError):
    """Such as a custom collective may raise."""


def check_only_errors_of_the_transport(explain: Callable[..., None]) -> None:
    """Only they are explained."""
    explain(OwnError("mine"), collective="all-gather", owner=None)
    cause = RuntimeError("gone")
    with pytest.raises(hpcompat.CollectiveError) as caught:
        explain(cause, collective="all-gather", owner=None)
    assert caught.value.__cause__ is cause


class LearningRate(dict[str, Any]):
    """A group of an optimizer that is a trap for the step that reads its learning rate."""

    def __getitem__(self, key: str) -> Any:
        if key == "lr":
            leave()
        return super().__getitem__(key)


def leave(*_: Any) -> None:
    if hpcompat.get_rank() == 1:
        if OPTIONS.hang:
            time.sleep(HANG_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def set_trap(model: Any, optimizer: Any) -> None:
    if OPTIONS.where == "forward":
        model[0].register_forward_hook(leave)
    elif OPTIONS.where == "backward":
        model[0].register_forward_hook(lambda module, args, output: output.register_hook(leave) and None)
    else:
        optimizer.param_groups[0] = LearningRate(optimizer.param_groups[0])


def step(model: Any, optimizer: Any) -> None:
    numbers = np.random.default_rng(hpcompat.get_rank())
    loss = model(hpcompat.from_numpy(numbers.normal(size=(6, 4)).astype(np.float32))).sum()
    hpcompat.backward(loss)
    hpcompat.optimizer_step(optimizer)
    hpcompat.zero_grad(optimizer)


def main() -> None:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    hpcompat.init_process_group(timeout=timedelta(seconds=OPTIONS.timeout) if OPTIONS.timeout else None)
    model = importlib.import_module(OPTIONS.model).model()
    optimizer = hpcompat.optim.AdamW(hpcompat.parameters(model))
    for _ in range(WHOLE_STEPS):
        step(model, optimizer)
    set_trap(model, optimizer)
    for _ in range(WHOLE_STEPS):
        step(model, optimizer)
    raise AssertionError("expected not to come here, but nobody is missing")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a module with a function of this name")
    parser.add_argument("--where", choices=WHERE, required=True)
    parser.add_argument("--hang", action="store_true", help="sleep instead of being killed")
    parser.add_argument("--timeout", type=float, help="seconds")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = parse()
    main()
