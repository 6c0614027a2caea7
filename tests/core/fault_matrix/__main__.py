"""Print the matrix: ``python -m fault_matrix --impl torch native``, with ``tests/core`` on the path.

Implementations that live in different environments stand side by side with ``--json`` in each and ``--load`` in one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fault_matrix import report, settings
from fault_matrix.cell import WHO
from fault_matrix.plants import PLANTS
from fault_matrix.settings import Setting
from fault_matrix.suite import Ranks, run

# By name: where its tests are, and its kit. In the order in which they are shown.
_TESTS = Path(__file__).parents[3] / "backends"
_KITS = {
    "torch": ("torch", "fault_kits:Torch"),
    "native": ("torch", "fault_kits:Native"),
    "mindspore": ("mindspore", "ms_fault_kit:MindSpore"),
}


def main() -> int:
    args = _arguments()
    chosen = [setting for setting in settings.SETTINGS if all(word in setting.id for word in args.setting)]
    results = report.load(args.load)
    for name in _KITS:
        if name in args.impl and not args.load:
            results |= _run(args, name, chosen)
    kits = [kit for _, kit in _KITS.values() if any(found == kit for found, _, _ in results)]
    if args.json:
        report.save(args.json, results)
    report.show(Console(width=args.width), results, kits=kits, settings=chosen, who=args.who)
    return sum(report.num_wrong(results, kit=kit) for kit in kits if not report.is_native(kit)) > 0


def _run(args: argparse.Namespace, name: str, chosen: list[Setting]) -> report.Results:
    backend, kit = _KITS[name]
    sys.path.append(str(_TESTS / backend / "tests"))
    jobs = [(setting, who) for setting in chosen for who in args.who]
    results: report.Results = {}
    with _pools(backend) as ranks, Progress(console=Console(stderr=True), transient=True) as progress:
        for setting, who in progress.track(jobs, description=name):
            cells = report.cells_for(kit, setting, who=who)
            if cells:
                found = run(ranks, kit=kit, setting=setting.id, cells=cells, optimizer=args.optimizer, plant=args.plant)
                results |= {(kit, setting.id, cell): verdicts for cell, verdicts in found.items()}
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fault_matrix", description=__doc__)
    parser.add_argument(
        "--impl", choices=list(_KITS), nargs="+", default=["torch"], help="side by side; native is torch's own FSDP2"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save what was found")
    parser.add_argument("--load", type=Path, nargs="+", default=[], metavar="FILE", help="show it without a run")
    parser.add_argument("--who", choices=WHO, nargs="+", default=list(WHO), help="which ranks fail")
    parser.add_argument("--setting", nargs="+", default=[], metavar="WORD", help="only settings with these words")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="with this bug")
    parser.add_argument("--width", type=int, help="columns of the output")
    return parser.parse_args()


@contextmanager
def _pools(backend: str) -> Iterator[Ranks]:
    from hpcompat_conformance.pool import PoolSet

    pools = PoolSet()
    try:
        if backend == "torch":
            yield pools
            return
        from hpcompat_conformance.adapters.hpcompat_mindspore import ADAPTER
        from hpcompat_conformance.mpirun import Mpirun

        yield lambda world_size: pools(world_size, setup=ADAPTER.worker_setup, launcher=Mpirun())
    finally:
        pools.close()


if __name__ == "__main__":
    sys.exit(main())
