"""Set-up of a worker that runs hyper-parallel on torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from hpcompat_conformance.context import WorkerContext
from hpcompat_conformance.on_hyper_parallel import shims
from hpcompat_conformance.on_torch import worker


def set_up(context: WorkerContext) -> Callable[[], dict[str, int]]:
    """Join the process group, choose the platform (which the package does at import) and apply the shims."""
    tidy = worker.set_up(context)
    shims.choose_platform("torch")
    shims.install()

    def tidy_both() -> dict[str, int]:
        shims.clean()
        return tidy()

    return tidy_both
