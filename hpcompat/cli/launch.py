"""``hpcompat launch``: start a training script on N processes with the launcher of the chosen framework.

torchrun for torch; for MindSpore mpirun on the CPU and msrun on Ascend.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hpcompat import registry
from hpcompat.cli.errors import CommandError

# Options that belong to torchrun: passed on as they are, so that its documentation stays the one to read.
TORCHRUN_OPTIONS = {
    "nnodes": "number of nodes, or MIN:MAX",
    "node-rank": "rank of this node",
    "rdzv-backend": "rendezvous backend",
    "rdzv-endpoint": "rendezvous endpoint, HOST:PORT",
    "rdzv-id": "id of this job",
    "rdzv-conf": "rendezvous settings, KEY=VALUE,...",
    "master-addr": "address of node 0 (static rendezvous)",
    "master-port": "port on node 0 (static rendezvous)",
    "local-addr": "address of this node",
    "max-restarts": "restarts of the workers before giving up",
    "monitor-interval": "seconds between two looks at the workers",
    "log-dir": "directory of the workers' logs",
    "redirects": "streams to write to the log directory",
    "tee": "streams to write to the console and to the log directory",
    "local-ranks-filter": "local ranks whose output is shown",
}
# Any of these says where the processes meet; without them a job of one node meets on a free port of its own.
RENDEZVOUS_OPTIONS = ("rdzv-endpoint", "rdzv-backend", "master-addr", "master-port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hpcompat launch``."""
    parser.usage = "hpcompat launch [-h] [-n N] [--backend NAME] [torchrun options] [-m] SCRIPT [ARGUMENT ...]"
    parser.add_argument(
        "-n", "--nproc-per-node", "--nproc_per_node", type=_positive, default=1, metavar="N", help="processes per node"
    )
    parser.add_argument("--backend", metavar="NAME", help="torch or mindspore (default: the one that is installed)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    group = parser.add_argument_group("passed on to torchrun")
    for option, text in TORCHRUN_OPTIONS.items():
        spellings = dict.fromkeys((f"--{option}", f"--{option.replace('-', '_')}"))
        group.add_argument(*spellings, dest=_destination(option), metavar="VALUE", help=text)
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the launcher; comes back only with an error.

    Replacing, not watching a child, makes the exit status, SIGINT and SIGTERM those of the launcher itself.
    """
    backend = _choose_backend(args.backend)
    if backend not in ("torch", "mindspore"):
        raise CommandError(f"starting scripts on the {backend!r} backend is not in this version")
    if not args.module and not Path(args.script).is_file():
        raise CommandError(f"expected a script to run, but got {args.script!r}, which is not a file")
    environment = launch_environment(os.environ, backend=backend, num_procs=args.nproc_per_node)
    if backend == "torch":
        command = torchrun_command(args, environ=os.environ)
    elif _has_ascend():
        command = msrun_command(args)
    else:
        command = mpirun_command(args)
        environment = {**mpi_environment(), **environment}
        if not sys.stdout.isatty():
            # mpirun gives the ranks a terminal even then; colours and moves of the cursor would fill the file.
            environment["TERM"] = "dumb"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def torchrun_command(args: argparse.Namespace, *, environ: Mapping[str, str]) -> list[str]:
    """The command line of torchrun for ``args``; ``environ`` because torchrun also takes its options as ``PET_*``.

    Raises:
        CommandError: several nodes, and no address to meet at.
    """
    options = {option: getattr(args, _destination(option)) for option in TORCHRUN_OPTIONS}
    from_environment = {option: environ.get(f"PET_{option.replace('-', '_').upper()}") for option in TORCHRUN_OPTIONS}
    given = {option: value or from_environment[option] for option, value in options.items()}
    single_node = given["nnodes"] in (None, "1", "1:1")
    if not single_node and not (given["rdzv-endpoint"] or given["master-addr"]):
        # torchrun would let every node wait for the others on its own localhost.
        raise CommandError(
            f"expected --rdzv-endpoint or --master-addr with --nnodes {given['nnodes']}, but got neither; "
            "give the address of one node, the same on all of them"
        )
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.nproc_per_node}"]
    if single_node and not any(given[option] for option in RENDEZVOUS_OPTIONS):
        command.append("--standalone")
        # The machine's own name, torchrun's default, need not resolve on a laptop or in a container.
        options["local-addr"] = given["local-addr"] or "localhost"
    command += [f"--{option}={value}" for option, value in options.items() if value]
    if args.module:
        command.append("--module")
    return [*command, args.script, *args.script_args]


def mpirun_command(args: argparse.Namespace) -> list[str]:
    """The command line of mpirun for ``args``: MindSpore on the CPUs of one machine.

    ``python -m mpi4py`` in the ranks, so that one that raises ends the others, which would wait for it forever.

    Raises:
        CommandError: options of torchrun, or MPI is not installed.
    """
    _refuse_torchrun_options(args, launcher="mpirun")
    mpirun = find_mpirun()
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        raise CommandError(
            "expected MPI for MindSpore on the CPU, but got no mpirun or no mpi4py; install them with: "
            "pip install 'hpcompat[mindspore-cpu]'"
        )
    # Ranks share the cores as the system likes: bound to one each, MindSpore's threads would queue behind one another.
    command = [mpirun, "-n", str(args.nproc_per_node), "--bind-to", "none"]
    if args.nproc_per_node > _num_cores():
        command.append("--oversubscribe")
    command += [sys.executable, "-m", "mpi4py"]
    return [*command, *(["-m"] if args.module else []), args.script, *args.script_args]


def find_mpirun() -> str | None:
    """mpirun of the openmpi package beside this interpreter, or else the system's."""
    beside = Path(sysconfig.get_path("scripts"), "mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


def mpi_environment() -> dict[str, str]:
    """What OpenMPI wants to be told, as containers often run as root, and what MindSpore on the CPU is faster with.

    The threads between which MindSpore hands its operations are busy waiting: with more ranks than spare cores they
    take the time that the operations need. And the C library gives large blocks back to the system when they are
    freed, page by page, only to get them again for the next operation; told to keep them, it holds what a step needs
    at most.
    """
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MS_DEV_LAUNCH_BLOCKING": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    }


def msrun_command(args: argparse.Namespace) -> list[str]:
    """The command line of msrun for ``args``: MindSpore on the Ascend NPUs of one machine."""
    _refuse_torchrun_options(args, launcher="msrun")
    if args.module:
        raise CommandError("expected a script, but got --module, which msrun does not take; pass the module's file")
    num_procs = args.nproc_per_node
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    command += [f"--worker_num={num_procs}", f"--local_worker_num={num_procs}", "--join=True"]
    return [*command, args.script, *args.script_args]


def _has_ascend() -> bool:
    return any(Path("/dev").glob("davinci[0-9]*"))


def _refuse_torchrun_options(args: argparse.Namespace, *, launcher: str) -> None:
    given = [f"--{option}" for option in TORCHRUN_OPTIONS if getattr(args, _destination(option)) is not None]
    if given:
        raise CommandError(
            f"expected no options of torchrun, but got {', '.join(given)}; {launcher} does not take them"
        )


def launch_environment(environ: Mapping[str, str], *, backend: str, num_procs: int) -> dict[str, str]:
    """``environ`` with the backend for the script, and the cores shared out unless the caller already did."""
    threads = max(1, _num_cores() // num_procs)
    return {"OMP_NUM_THREADS": str(threads), **environ, registry.ENV_VAR: backend}


def _choose_backend(requested: str | None) -> str:
    wanted = None if requested is None else registry.canonical_name(requested)
    if wanted == "mindspore" and wanted not in registry.available_backends():
        raise CommandError("the mindspore backend is not in this version; use --backend torch")
    try:
        chosen = registry.chosen_name(requested)
    except ValueError as error:
        raise CommandError(str(error)) from error
    installed = registry.installed_backends()
    if chosen is None and len(installed) == 1:
        return installed[0]
    if chosen is None or chosen not in installed:
        missing = "one installed backend" if chosen is None else f"the framework of {chosen!r} to be installed"
        raise CommandError(
            f"expected {missing}, but got {', '.join(installed) or 'none'}; name one with --backend, "
            f"or install it with: pip install 'hpcompat[{chosen or 'torch'}]'"
        )
    return chosen


def _destination(option: str) -> str:
    return f"torchrun_{option.replace('-', '_')}"


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of processes of at least 1, but got {text!r}")
    return value
