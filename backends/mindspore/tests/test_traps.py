"""One test for each known trap of MindSpore on the CPU, which fails if we fall into it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hpcompat_mindspore
from hpcompat import CapabilityError
from hpcompat_conformance.pytest_plugin import Ranks
from hpcompat_mindspore import probe

JOBS = [
    ("accumulation_into_views", {"sync": False}),
    ("accumulation_into_views", {"sync": True}),
    ("ignored_parameter_with_a_view", {}),
    *(("update_is_seen", {"how": how}) for how in ("copy_", "slice", "assign", "assign_add", "set_data", "data")),
    ("gradients_of_a_slow_backward", {}),
    ("data_changes_behind_the_queue", {}),
    ("exceptions_with_queued_callbacks", {}),
    ("hooks_on_frozen_parameters", {}),
    ("no_collectives_of_mindspore", {}),
    ("recomputation", {"inner": True}),
    ("recomputation", {"inner": False}),
    ("gradient_shared_with_another", {}),
    ("gradient_shared_with_another", {"ignored": True}),
    ("remembered_shapes", {"dtype": None}),
    ("remembered_shapes", {"dtype": "float16"}),
]


@pytest.mark.parametrize(("job", "options"), JOBS, ids=[f"{job} {list(o.values())}" for job, o in JOBS])
def test_trap(ranks: Ranks, job: str, options: dict[str, object]) -> None:
    ranks(2, queued=True).run(f"ms_traps:{job}", **options)


# On the CPU these leave their tensor as it is, or do not exist.
DO_NOTHING = {"add_", "sub_", "mul_", "div_", "zero_", "fill_"}


def test_no_operator_that_does_nothing_in_place() -> None:
    for path in Path(hpcompat_mindspore.__file__).parent.glob("*.py"):
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not called & DO_NOTHING, path.name


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(CapabilityError, match=r"numpy 1 only, but got 2\.1\.0"):
        probe.require.__wrapped__()


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NAMES", (*probe.NAMES, ("mindspore.graph.api", "_pynative_executor.gone")))
    with pytest.raises(CapabilityError, match=r"has no mindspore\.graph\.api\._pynative_executor\.gone; use 2\.10"):
        probe.require.__wrapped__()


def test_a_changed_behaviour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "behaviours", lambda: {"tensors that share numpy's memory": False})
    with pytest.raises(CapabilityError, match='lacks the capability "tensors that share numpy\'s memory"'):
        probe.require.__wrapped__()


def test_behaviours_hold() -> None:
    assert probe.missing_names() == []
    assert set(probe.behaviours().values()) == {True}


def test_graph_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspore

    monkeypatch.setattr(mindspore, "get_context", lambda name: mindspore.GRAPH_MODE)
    with pytest.raises(CapabilityError, match="hooks in graph mode"):
        probe.require.__wrapped__()


def test_msrun_on_the_cpu_is_refused() -> None:
    code = "from hpcompat_mindspore.job import world; world()"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "MS_WORKER_NUM": "2", "MS_ROLE": "MS_WORKER"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "start the script with hpcompat launch, which uses MPI" in result.stderr
