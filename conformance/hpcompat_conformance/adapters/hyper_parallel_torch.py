"""hyper-parallel's public code on torch, on the CPU. See `hpcompat_conformance.on_hyper_parallel`."""

from __future__ import annotations

from types import SimpleNamespace

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities

ADAPTER = Adapter(
    name="hyper-parallel-torch",
    modules=("hyper_parallel", "torch"),
    worker_setup="hpcompat_conformance.on_hyper_parallel.torch_worker:set_up",
    load="hpcompat_conformance.adapters.hyper_parallel_torch:load",
)


def load() -> Implementation:
    """Runs in a worker."""
    import torch
    from hyper_parallel.core.fully_shard import api as theirs
    from hyper_parallel.platform.torch.fully_shard import utils

    from hpcompat_conformance.on_hyper_parallel.shims import ON_TORCH
    from hpcompat_conformance.on_hyper_parallel.torch_framework import HyperParallelTorchFramework, on_local_tensors
    from hpcompat_conformance.on_hyper_parallel.versions import of_package

    api = SimpleNamespace(
        fully_shard=theirs.fully_shard,
        FSDPModule=theirs.HSDPModule,  # the one name that a migrating script has to change
        MixedPrecisionPolicy=utils.MixedPrecisionPolicy,
        OffloadPolicy=utils.OffloadPolicy,
        CPUOffloadPolicy=utils.CPUOffloadPolicy,
        # It has none of its own. torch's takes its parameters only with their dispatch off, as its optimizers do.
        clip_grad_norm_=on_local_tensors(torch.nn.utils.clip_grad_norm_),
        zero_grad=torch.nn.Module.zero_grad,
    )
    framework = HyperParallelTorchFramework()
    versions = {**of_package(shims=ON_TORCH), **framework.versions()}
    return Implementation(api, framework, api_capabilities(api) | framework.capabilities, versions)
