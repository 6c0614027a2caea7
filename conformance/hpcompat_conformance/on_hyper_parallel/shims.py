"""All that is done to hyper-parallel's public code so that it runs on a CPU, in one place.

Nothing here corrects what it computes. Each shim stands in for something that an accelerator, or a process of its own
for each test, would give it. The reports show their names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

ON_TORCH = {
    "gathers keep the version counter": "gloo fills the output of a gather with an in-place operation of torch, which "
    "autograd takes for a change to the parameters that forward used; FSDP2 keeps the counter, this code does not",
    "clean state between cases": "its queues of reductions and its flags belong to the class and outlive a model; "
    "cases that share a process would see each other's",
}
ON_MINDSPORE = {
    "hpcompat's mesh": "its own always starts hccl, which MindSpore refuses on a CPU",
    "device='CPU'": "without it fully_shard asks mindspore.is_available(), which does not exist",
}


def choose_platform(name: str) -> None:
    """Before the package is imported for the first time, which settles it."""
    os.environ["HYPER_PARALLEL_PLATFORM"] = name


def install() -> None:
    """Apply those on torch to this process. Call once, when the default process group is there."""
    from hyper_parallel.platform.torch.fully_shard.param import TorchHSDPParamV2 as Param

    Param.unshard = _opening(Param.unshard)
    Param.wait_for_unshard = _closing(Param.wait_for_unshard)


def clean() -> None:
    """Those on torch: to be called between two cases."""
    from hyper_parallel.core.shard._op_dispatch import enable_dtensor_dispatch
    from hyper_parallel.platform.torch.fully_shard.scheduler import TorchHSDPSchedulerV2
    from hyper_parallel.platform.torch.fully_shard.state import TorchHSDPStateV2

    TorchHSDPStateV2.pre_reduce_scatter_params.clear()
    TorchHSDPStateV2.pre_all_reduce_params.clear()
    TorchHSDPSchedulerV2.root_bp_state = False
    enable_dtensor_dispatch()


def _opening(unshard: Callable[..., None]) -> Callable[..., None]:
    """Keeps the counter from the start of a gather. With one rank there is none, hence nothing of gloo's to undo."""
    import torch

    @functools.wraps(unshard)
    def stand_in(param: Any, *args: Any, **kwargs: Any) -> None:
        if param.shard_world_size > 1 and not hasattr(param, "_kept_versions"):
            outputs = tuple(param.all_gather_outputs)
            kept: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(outputs)
            kept.__enter__()
            param._kept_versions = kept
        unshard(param, *args, **kwargs)

    return stand_in


def _closing(wait_for_unshard: Callable[..., None]) -> Callable[..., None]:
    """To its end."""

    @functools.wraps(wait_for_unshard)
    def stand_in(param: Any) -> None:
        wait_for_unshard(param)
        kept = param.__dict__.pop("_kept_versions", None)
        if kept is not None:
            kept.__exit__(None, None, None)

    return stand_in
