"""Print the matrix: ``python -m fault_matrix --backend torch --native``, with ``tests/core`` on the path."""

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
from fault_matrix.suite import Ranks, run

# By backend: where its tests are, and its kits, ours first.
_TESTS = Path(__file__).parents[3] / "backends"
_KITS = {"torch": ("fault_kits:Torch", "fault_kits:Native"), "mindspore": ("ms_fault_kit:MindSpore",)}


def main() -> int:
    args = _arguments()
    sys.path.append(str(_TESTS / args.backend / "tests"))
    console = Console(width=args.width)
    chosen = [setting for setting in settings.SETTINGS if all(word in setting.id for word in args.setting)]
    kits = _KITS[args.backend][: 2 if args.native else 1]
    results: report.Results = {}
    with _pools(args.backend) as ranks, Progress(console=Console(stderr=True), transient=True) as progress:
        for kit in progress.track(kits, description="implementations"):
            for setting in progress.track(chosen, description=kit):
                for who in args.who:
                    cells = report.cells_for(kit, setting, who=who)
                    found = run(
                        ranks, kit=kit, setting=setting.id, cells=cells, optimizer=args.optimizer, plant=args.plant
                    )
                    results |= {(kit, setting.id, cell): verdicts for cell, verdicts in found.items()}
    report.show(console, results, kits=kits, settings=chosen, who=args.who)
    return report.num_wrong(results, kit=kits[0]) > 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fault_matrix", description=__doc__)
    parser.add_argument("--backend", choices=sorted(_KITS), default="torch")
    parser.add_argument("--native", action="store_true", help="the framework's own FSDP2 beside ours (torch)")
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
