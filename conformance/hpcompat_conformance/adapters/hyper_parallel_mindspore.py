"""hyper-parallel's public code on MindSpore, on the CPU over MPI. See `hpcompat_conformance.on_hyper_parallel`.

Its ``fully_shard`` imports torch whatever the platform, so both frameworks must be installed.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities
from hpcompat_conformance.mpirun import Mpirun

ADAPTER = Adapter(
    name="hyper-parallel-mindspore",
    modules=("hyper_parallel", "torch", "hpcompat_mindspore", "mindspore", "mpi4py"),
    worker_setup="hpcompat_conformance.on_mindspore.worker:set_up",
    load="hpcompat_conformance.adapters.hyper_parallel_mindspore:load",
    launcher=Mpirun(),
)


def load() -> Implementation:
    """Runs in a worker."""
    from hpcompat_conformance.on_hyper_parallel.shims import ON_MINDSPORE, choose_platform
    from hpcompat_conformance.on_hyper_parallel.versions import of_package

    choose_platform("mindspore")
    from hyper_parallel.core.fully_shard import api as theirs
    from hyper_parallel.platform.torch.fully_shard import utils

    from hpcompat_conformance.on_mindspore.framework import MindSporeFramework

    api = SimpleNamespace(
        fully_shard=partial(theirs.fully_shard, device="CPU"),
        FSDPModule=theirs.HSDPModule,  # the one name that a migrating script has to change
        MixedPrecisionPolicy=utils.MixedPrecisionPolicy,
        OffloadPolicy=utils.OffloadPolicy,
    )
    framework = MindSporeFramework()
    versions = {**of_package(shims=ON_MINDSPORE), **framework.versions()}
    return Implementation(api, framework, api_capabilities(api) | framework.capabilities, versions)
