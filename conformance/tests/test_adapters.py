"""Adapters of others: that a third party's distribution is found, and what is said of a package that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcompat_conformance import expected, impl

MODULE = """
from hpcompat_conformance.adapters import torch_fsdp2
from hpcompat_conformance.impl import Adapter

ADAPTER = Adapter(
    name="stand-in",
    modules=("stand_in", "torch"),
    worker_setup="hpcompat_conformance.on_torch.worker:set_up",
    load="stand_in:load",
)


def load():
    implementation = torch_fsdp2.load()
    implementation.versions["stand-in"] = "1.0"
    return implementation
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    """A folder as pip would leave it, with one distribution in it."""
    metadata = tmp_path / "stand_in-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{impl.ENTRY_POINT_GROUP}]\nstand-in = stand_in:ADAPTER\n")
    (tmp_path / "stand_in.py").write_text(MODULE)
    return tmp_path


def test_a_distribution_of_others_is_found_and_run(distribution: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "hpcompat_conformance", "--impl", "stand-in", "--procs", "1"]
    command += ["--only", r"^schedule\.one_process", "--json", str(report)]
    path = os.pathsep.join([str(distribution), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    (run,) = json.loads(report.read_text())["runs"]
    assert run["implementation"] == "stand-in"
    assert run["versions"]["stand-in"] == "1.0"
    assert run["totals"]["pass"] == 1


@pytest.mark.parametrize("name", ["hyper-parallel-mindspore", "hyper-parallel-torch"])
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == "hyper_parallel" else found(module)
    )
    adapter = impl.adapter_named(name)
    assert adapter.name == name
    assert "hyper_parallel" in adapter.missing()


def test_a_gap_of_all_cases_leaves_those_before_it_to_their_own(tmp_path: Path) -> None:
    path = tmp_path / "gaps.json"
    own, rest = ({"case": case, "reason": case, "link": "https://x"} for case in ("a.b", expected.ANY_CASE))
    path.write_text(json.dumps({"implementation": "mine", "gaps": [own, rest]}))
    gaps = expected.load_gaps(path, known_cases=["a.b", "c.d"])
    first = {case: next(gap for gap in gaps if gap.applies(case, procs=1, versions={})) for case in ("a.b", "c.d")}
    assert {case: gap.reason for case, gap in first.items()} == {"a.b": "a.b", "c.d": expected.ANY_CASE}
