"""hpcompat on its MindSpore backend, on the CPU over MPI."""

from __future__ import annotations

from importlib.metadata import version

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities
from hpcompat_conformance.mpirun import Mpirun

ADAPTER = Adapter(
    name="hpcompat-mindspore",
    modules=("hpcompat", "hpcompat_mindspore", "mindspore", "mpi4py"),
    worker_setup="hpcompat_conformance.on_mindspore.worker:set_up",
    load="hpcompat_conformance.adapters.hpcompat_mindspore:load",
    launcher=Mpirun(),
)


def load() -> Implementation:
    """Runs in a worker."""
    import hpcompat
    from hpcompat_conformance.on_mindspore.framework import MindSporeFramework

    framework = MindSporeFramework()
    versions = {"hpcompat": version("hpcompat"), **framework.versions()}
    return Implementation(hpcompat, framework, api_capabilities(hpcompat) | framework.capabilities, versions)
