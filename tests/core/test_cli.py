"""The command line: what it parses, what it starts, and what it says when something is missing."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from hpcompat import registry
from hpcompat.cli import COMMANDS, launch, main
from hpcompat.cli.errors import CommandError

# Stands in for torchrun: says how it was called, then ends as its first argument for the script tells it.
FAKE_TORCHRUN = """
import json, os, signal, sys
keys = ("HPCOMPAT_BACKEND", "OMP_NUM_THREADS")
print(json.dumps({"argv": sys.argv[1:], "environ": {key: os.environ.get(key) for key in keys}}), flush=True)
if sys.argv[-1] == "wait":
    wanted = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    sys.exit(100 + wanted)
sys.exit(int(sys.argv[-1]))
"""


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_args(arguments)


def torchrun(*arguments: str, environ: dict[str, str] | None = None) -> list[str]:
    command = launch.torchrun_command(parse(*arguments), environ=environ or {})
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return command[3:]


@pytest.fixture
def fake_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a torch with nothing in it but a launcher."""
    package = tmp_path / "site" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(FAKE_TORCHRUN)
    (tmp_path / "train.py").touch()
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HPCOMPAT_", "PET_", "OMP_"))}
    return {**environ, "PYTHONPATH": str(tmp_path / "site")}


def start(*arguments: str, environ: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hpcompat.cli", *arguments]
    return subprocess.Popen(
        command, env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_one_node_meets_on_a_free_port() -> None:
    assert torchrun("-n", "2", "train.py") == [
        "--nproc-per-node=2",
        "--standalone",
        "--local-addr=localhost",
        "train.py",
    ]


def test_one_process_is_the_default() -> None:
    assert torchrun("train.py")[0] == "--nproc-per-node=1"


def test_everything_after_the_script_belongs_to_the_script() -> None:
    arguments = ["-n", "4", "--backend", "x", "--steps", "3", "--", "-m", "--nnodes=2"]
    assert torchrun("-n", "2", "train.py", *arguments)[-10:] == ["train.py", *arguments]


def test_module_instead_of_script() -> None:
    assert torchrun("-m", "package.train", "--lr", "1")[-4:] == ["--module", "package.train", "--lr", "1"]


@pytest.mark.parametrize("spelling", ["dash", "underscore"])
def test_multi_node_options_are_passed_on(spelling: str) -> None:
    options = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29501", "--max-restarts=0"]
    given = [option.replace("-", "_").replace("__", "--") if spelling == "underscore" else option for option in options]
    command = torchrun("-n", "8", *given, "train.py")
    assert command == ["--nproc-per-node=8", *options, "train.py"]


@pytest.mark.parametrize("nnodes", ["2", "1:4"])
def test_rendezvous_endpoint_is_passed_on(nnodes: str) -> None:
    command = torchrun(f"--nnodes={nnodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=7", "train.py")
    assert command[1:-1] == [f"--nnodes={nnodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--rdzv-id=7"]


@pytest.mark.parametrize("nnodes", ["1", "1:1"])
def test_one_node_spelled_out_is_still_one_node(nnodes: str) -> None:
    assert "--standalone" in torchrun("--nnodes", nnodes, "--node-rank", "0", "train.py")


@pytest.mark.parametrize("option", ["--master-port=29501", "--rdzv-endpoint=localhost:0", "--master-addr=localhost"])
def test_a_rendezvous_of_the_user_is_not_overridden(option: str) -> None:
    assert torchrun(option, "train.py") == ["--nproc-per-node=1", option, "train.py"]


def test_a_rendezvous_in_the_environment_is_not_overridden() -> None:
    environ = {"PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1", "PET_NODE_RANK": "1"}
    assert torchrun("train.py", environ=environ) == ["--nproc-per-node=1", "train.py"]


def test_own_address_is_kept() -> None:
    assert "--local-addr=10.0.0.2" in torchrun("--local-addr", "10.0.0.2", "train.py")


@pytest.mark.parametrize("environ", [{}, {"PET_NNODES": "2"}])
def test_several_nodes_need_an_address(environ: dict[str, str]) -> None:
    options = [] if environ else ["--nnodes=2"]
    with pytest.raises(CommandError, match="expected --rdzv-endpoint or --master-addr with --nnodes 2"):
        torchrun(*options, "train.py", environ=environ)


@pytest.mark.parametrize("number", ["0", "-1", "two", ""])
def test_number_of_processes_is_checked(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(f"-n={number}", "train.py")
    assert stopped.value.code == 2
    assert "expected a number of processes of at least 1, but got" in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "procs", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch, cores: int, procs: int, threads: str) -> None:
    monkeypatch.setattr(launch, "_num_cores", lambda: cores)
    environment = launch.launch_environment({"A": "b"}, backend="torch", num_procs=procs)
    assert environment == {"A": "b", "OMP_NUM_THREADS": threads, "HPCOMPAT_BACKEND": "torch"}


def test_threads_of_the_user_are_kept_and_the_backend_is_not() -> None:
    environ = {"OMP_NUM_THREADS": "3", "HPCOMPAT_BACKEND": "pt"}
    environment = launch.launch_environment(environ, backend="torch", num_procs=1)
    assert environment == {"OMP_NUM_THREADS": "3", "HPCOMPAT_BACKEND": "torch"}


@pytest.mark.parametrize("status", [0, 3])
def test_launch_runs_torchrun_and_ends_with_its_status(fake_torch: dict[str, str], tmp_path: Path, status: int) -> None:
    environ = {**fake_torch, "OMP_NUM_THREADS": "5"}
    arguments = ["launch", "-n", "2", "--backend", "pt", "train.py", "--steps", str(status)]
    process = start(*arguments, environ=environ, cwd=tmp_path)
    output, errors = process.communicate()
    assert process.returncode == status, errors
    assert json.loads(output) == {
        "argv": ["--nproc-per-node=2", "--standalone", "--local-addr=localhost", "train.py", "--steps", str(status)],
        "environ": {"HPCOMPAT_BACKEND": "torch", "OMP_NUM_THREADS": "5"},
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_launcher(fake_torch: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    # Blocked from the start, and so also between the line that says it is ready and the wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        process = start("launch", "--backend", "torch", "train.py", "wait", environ=fake_torch, cwd=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    assert process.stdout is not None
    assert "wait" in process.stdout.readline()
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 100 + number


def test_a_missing_script_is_named(
    fake_torch: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(fake_torch["PYTHONPATH"])
    assert main(["launch", "--backend", "torch", str(tmp_path / "gone.py")]) == 2
    assert "gone.py', which is not a file" in capsys.readouterr().err


def test_mindspore_that_is_not_here_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_declared", dict)
    assert main(["launch", "--backend", "ms", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "hpcompat launch: error: the mindspore backend is not in this version; use --backend torch\n"
    )


def test_an_unknown_backend_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--backend", "jax", "train.py"]) == 2
    assert "expected backend to name an installed backend, but got 'jax'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--backend=torch"]])
def test_launch_without_a_framework_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.delenv(registry.ENV_VAR, raising=False)
    monkeypatch.setattr(registry, "installed_backends", list)
    assert main(["launch", *options, "train.py"]) == 2
    assert "but got none; name one with --backend, or install it with: pip install 'hpcompat[torch]'" in (
        capsys.readouterr().err
    )


def run_blocked(*arguments: str, blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter in which the packages ``blocked`` cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
        f"from hpcompat.cli import main; sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_info_as_json_without_any_framework() -> None:
    result = run_blocked("info", "--json", blocked=["torch", "mindspore", "numpy", "rich"])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["hpcompat"] == version("hpcompat")
    assert report["backends"]["torch"] == {
        "framework_installed": False,
        "error": "torch is not installed: pip install 'hpcompat[torch]'",
    }


class Probed:
    """A backend that can be asked what it can do, or that fails when it is."""

    name = "torch"

    def __init__(self, answer: dict[str, object] | Exception) -> None:
        self._answer = answer

    def probe(self) -> dict[str, object]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def install(monkeypatch: pytest.MonkeyPatch, answer: dict[str, object] | Exception) -> None:
    monkeypatch.setattr(registry, "available_backends", lambda: {"torch": None})
    monkeypatch.setattr(registry, "framework_installed", lambda name: True)
    monkeypatch.setattr(registry, "get_backend", lambda name: Probed(answer))


ANSWER: dict[str, object] = {
    "versions": {"torch": "9.9"},
    "devices": ["cpu", "[npu:0]"],
    "capabilities": {"reduce_avg": True, "streams": False},
}


def test_info_as_json_has_what_a_backend_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ANSWER)
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"] == {"torch": {"framework_installed": True, **ANSWER}}


def test_info_as_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, ANSWER)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["info"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "backend torch" in lines
    assert "versions: torch 9.9" in lines
    assert "devices cpu, [npu:0]" in lines
    assert "capabilities: reduce avg yes" in lines
    assert "capabilities: streams no" in lines


def test_info_shows_a_broken_backend_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, OSError("libhccl.so not found"))
    assert main(["info", "--json"]) == 1
    entry = json.loads(capsys.readouterr().out)["backends"]["torch"]
    assert entry == {"framework_installed": True, "error": "OSError: libhccl.so not found"}


def test_tables_without_rich_say_what_to_install() -> None:
    result = run_blocked("info", blocked=["rich", "torch", "mindspore"])
    assert result.returncode == 2
    assert result.stderr == (
        "hpcompat info: error: this needs the package 'rich', which is not installed; "
        "install it with: pip install 'hpcompat[cli]'\n"
    )


@pytest.mark.parametrize("missing", ["hpcompat_conformance", "pytest"])
def test_conformance_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    fail_to_import_the_suite(monkeypatch, missing)
    assert main(["conformance", "--impl", "hpcompat-torch"]) == 2
    assert capsys.readouterr().err == (
        f"hpcompat conformance: error: the conformance suite needs {missing!r}, which is not installed; "
        "install it with: pip install 'hpcompat[conformance]'\n"
    )


def test_any_other_missing_module_is_a_bug_and_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_import_the_suite(monkeypatch, "misspelt")
    with pytest.raises(ModuleNotFoundError, match="misspelt"):
        main(["conformance"])


def fail_to_import_the_suite(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = importlib.import_module

    def import_module(name: str) -> ModuleType:
        if name == "hpcompat_conformance.cli":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_each_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("launch", "info"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"usage: hpcompat {command}" in capsys.readouterr().out


def test_help_lists_the_commands_and_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert all(command in output for command in COMMANDS)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hpcompat {version('hpcompat')}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"]])
def test_an_unknown_command_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: hpcompat" in capsys.readouterr().err
