"""The command line, on native FSDP2 where something must run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcompat_conformance import document, impl, mpirun, rendering, report, spec
from hpcompat_conformance.adapters import torch_fsdp2
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.cli import main
from hpcompat_conformance.document import Document

NATIVE = ("--impl", "torch-fsdp2", "--procs", "1", "--only", r"^schedule\.one_process")


def test_a_run_writes_json_and_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main([*NATIVE, "--json", str(tmp_path / "report.json")]) == 0
    (content,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert [(one["id"], one["clause"], one["procs"], one["result"]) for one in content["cases"]] == [
        ("schedule.one_process_communicates_nothing", "SCH-04", 1, "pass")
    ]
    assert content["implementation"] == "torch-fsdp2"
    assert "torch" in content["versions"]
    command = "hpcompat conformance --impl torch-fsdp2 --procs 1 --spec 2026.12 --seed 2026 --only"
    assert content["origin"]["command"].startswith(command)
    shown = capsys.readouterr().out
    assert "torch-fsdp2: 1 pass in" in shown
    assert "the 1 slowest" in shown
    assert f"{len(spec.clauses())} clauses, {len(all_cases())} cases" in shown


def test_a_stale_expectation_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    entry = {"case": "schedule.one_process_communicates_nothing", "reason": "r", "link": "l"}
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps({"implementation": "torch-fsdp2", "gaps": [entry]}))
    assert main([*NATIVE, "--xfails", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "XPASS" in shown
    assert "1 xpass" in shown
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"implementation": "hpcompat-torch", "gaps": []}))
    assert main([*NATIVE, "--xfails", str(other)]) == 2
    assert "to be about torch-fsdp2, but got 'hpcompat-torch'" in capsys.readouterr().err.replace("\n", " ")


def test_several_implementations_and_reports_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    options = ["--impl", "hpcompat-torch", "--report", "json,md", "--report", "junit", "--out", str(tmp_path)]
    assert main([*NATIVE, *options]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"conformance.json", "conformance.md", "conformance.xml"}
    runs = json.loads((tmp_path / "conformance.json").read_text())["runs"]
    assert [run["implementation"] for run in runs] == ["torch-fsdp2", "hpcompat-torch"]
    shown = capsys.readouterr().out
    assert "torch-fsdp2: 1 pass" in shown
    assert "hpcompat-torch: 1 pass" in shown


def test_a_stale_waiver_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps({"waivers": [{"case": "no.such", "reason": "r", "until": "9999-01-01"}]}))
    assert main([*NATIVE, "--waivers", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "COMPLAINT expected waivers that are needed, but that of case no.such names nothing" in shown


def test_ctrl_c_loses_no_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")

    def interrupt(self: report.LiveProgress, case: Case, *, procs: int) -> None:
        if case.id != first:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.LiveProgress, "started", interrupt)
    first, *others = [case.id for case in all_cases() if case.id.startswith("schedule.") and 1 in case.procs]
    options = ["--impl", "torch-fsdp2,hpcompat-torch", "--procs", "1", "--only", r"^schedule\."]
    assert main([*options, "--report", "json,md", "--out", str(tmp_path)]) == 1
    found = document.read(tmp_path / "conformance.json")
    assert [(run.implementation, [result.id for result in run.results]) for run in found.runs] == [
        ("torch-fsdp2", [first])
    ]
    size = 1 + len(others)
    assert found.complaints == [
        f"interrupted: 1 of {size} results for torch-fsdp2",
        f"interrupted: 0 of {size} results for hpcompat-torch",
    ]
    for shown in (capsys.readouterr().out, (tmp_path / "conformance.md").read_text()):
        assert f"interrupted: 1 of {size} results for torch-fsdp2" in shown


def test_merging_results_of_several_environments(
    outcome: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for run in outcome.runs:
        paths.append(tmp_path / f"{run.implementation}.json")
        document.write(Document([run]), paths[-1])
    options = ["--report", "json", "--out", str(tmp_path / "out")]
    assert main(["--merge", str(paths[0]), *options]) == 0
    assert main(["--merge", *map(str, paths), *options]) == 1
    merged = document.read(tmp_path / "out" / "conformance.json")
    assert [run.implementation for run in merged.runs] == ["good-one", "bad-one"]
    assert "bad-one: 2 pass, 1 fail" in capsys.readouterr().out


def test_the_spec_as_a_page(tmp_path: Path) -> None:
    assert main(["--spec-page", str(tmp_path / "spec.md")]) == 0
    assert (tmp_path / "spec.md").read_text() == rendering.spec_page(spec.VERSION)


def test_the_public_reports_as_a_page(tmp_path: Path) -> None:
    assert main(["--public-reports-page", str(tmp_path / "reports.md")]) == 0
    assert (tmp_path / "reports.md").read_text() == rendering.public_reports_page(spec.VERSION)


def test_cases_as_tests_of_pytest(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    entry = {"case": "schedule.one_process_communicates_nothing", "reason": "r", "link": "l"}
    path = tmp_path / "gaps.json"
    path.write_text(json.dumps({"implementation": "torch-fsdp2", "gaps": [entry]}))
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--pyargs", "hpcompat_conformance"]
    command += ["-p", "hpcompat_conformance.pytest_cases", *NATIVE]
    for extra, status, words in (
        ((), 0, "PASSED"),
        (("--xfails", str(path)), 1, "XPASS schedule.one_process_communicates_nothing on 1"),
        (("--impl", "fsdp3"), 4, "but got 'fsdp3'"),
    ):
        done = subprocess.run([*command, *extra], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, words in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr


def test_list_shows_what_only_selects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "ACC-0[12]"]) == 0
    shown = capsys.readouterr().out
    clauses = [one.clause for one in all_cases() if one.clause in ("ACC-01", "ACC-02")]
    listing, coverage = shown.split(f"spec {spec.VERSION}: ")
    assert [word for word in listing.split() if word.startswith("ACC-")] == clauses
    assert coverage.startswith(f"{len(spec.clauses())} clauses, {len(all_cases())} cases;")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "expected --impl with one of"),
        (("--impl", "fsdp3"), "but got 'fsdp3'"),
        (("--impl", "torch-fsdp2", "--only", "nothing_like_this"), "matches none"),
        (("--impl", "torch-fsdp2", "--xfails", "missing.json"), "missing.json"),
        (("--impl", "torch-fsdp2", "--waivers", "missing.json"), "missing.json"),
        (("--impl", "torch-fsdp2", "--spec", "1999.01"), "expected a spec out of 2026.12, but got '1999.01'"),
        (("--list", "--spec", "1999.01"), "expected a spec out of 2026.12, but got '1999.01'"),
        (("--impl", "torch-fsdp2", "--report", "md"), "expected --out DIR beside --report"),
        (("--impl", "torch-fsdp2", "--dump-on-failure"), "expected --out DIR beside --dump-on-failure"),
        (("--merge", "missing.json", "--report", "md", "--out", "out"), "missing.json"),
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
        (("--report", "pdf"), "expected formats out of json, junit, html, md, features, badge, but got 'pdf'"),
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


def test_the_help_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A percent sign that is not escaped makes argparse print its own dict."""
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "'dest'" not in shown
    assert "% are killed" in " ".join(shown.split())


def test_tables_in_a_file_have_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("clause\t"))
    rows = [line for line in lines if line.count("\t") == heading.count("\t")]
    assert len(rows) > 200
    assert not set("\u2501\u2502\u2503") & set("".join(lines))
