"""Set-up of a worker without any framework."""

from __future__ import annotations

from hpcompat_conformance.context import WorkerContext


def set_up(context: WorkerContext) -> None:
    """Nothing to do."""
