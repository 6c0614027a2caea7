"""The command line, on native FSDP2 where something must run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcompat_conformance import impl, mpirun
from hpcompat_conformance.adapters import torch_fsdp2
from hpcompat_conformance.case import all_cases
from hpcompat_conformance.cli import main

NATIVE = ("--impl", "torch-fsdp2", "--procs", "1", "--only", r"^schedule\.one_process")


def test_a_run_writes_json_and_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([*NATIVE, "--json", str(tmp_path / "report.json")]) == 0
    content = json.loads((tmp_path / "report.json").read_text())
    assert [(one["id"], one["clause"], one["procs"], one["result"]) for one in content["cases"]] == [
        ("schedule.one_process_communicates_nothing", "SCH-04", 1, "pass")
    ]
    assert content["impl"] == "torch-fsdp2"
    assert "torch" in content["versions"]
    assert "1 pass in" in capsys.readouterr().out


def test_a_stale_expectation_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    entry = {"case": "schedule.one_process_communicates_nothing", "reason": "r", "link": "l"}
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps({"implementation": "torch-fsdp2", "gaps": [entry]}))
    assert main([*NATIVE, "--xfails", str(path)]) == 1
    assert "1 xpass" in capsys.readouterr().out


def test_list_shows_what_only_selects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "ACC-0[12]"]) == 0
    shown = capsys.readouterr().out
    clauses = [one.clause for one in all_cases() if one.clause in ("ACC-01", "ACC-02")]
    assert [word for word in shown.split() if word.startswith("ACC-")] == clauses


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "expected --impl with one of"),
        (("--impl", "fsdp3"), "but got 'fsdp3'"),
        (("--impl", "torch-fsdp2", "--only", "nothing_like_this"), "matches none"),
        (("--impl", "torch-fsdp2", "--xfails", "missing.json"), "missing.json"),
    ],
)
def test_requests_that_make_no_sense(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--procs", "two"), "expected positive numbers such as 1,2,4"),
        (("--procs", "0"), "expected positive numbers such as 1,2,4"),
        (("--only", "("), "expected a regular expression"),
    ],
)
def test_options_that_do_not_parse(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_implementation_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_fsdp2, "ADAPTER", replace(torch_fsdp2.ADAPTER, modules=("json", "no_such_module")))
    assert main(["--impl", "torch-fsdp2"]) == 2
    assert "not installed: no_such_module" in capsys.readouterr().err.replace("\n", " ")


def test_what_mindspore_needs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("mindspore", "mpi4py") else object())
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: None)
    assert main(["--impl", "hpcompat-mindspore"]) == 2
    assert "not installed: mindspore, mpi4py, mpirun" in capsys.readouterr().err.replace("\n", " ")


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcompat_conformance", "--list"], capture_output=True, text=True, check=True
    )
    assert f"{len(all_cases())} cases" in done.stdout


def test_the_command_line_imports_no_framework() -> None:
    code = "import sys, hpcompat_conformance.cli as cli; cli.all_cases(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "hpcompat_conformance.cases.schedule" in loaded
    assert not loaded & {"torch", "mindspore", "hpcompat"}


@pytest.mark.parametrize("name", impl.BUILT_IN)
def test_an_adapter_is_found_without_its_framework(name: str) -> None:
    code = f"import sys; from hpcompat_conformance import impl; impl.adapter_named({name!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert impl.BUILT_IN[name].partition(":")[0] in loaded
    assert not loaded & {"torch", "mindspore", "mpi4py"}
