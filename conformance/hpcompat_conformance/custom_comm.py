"""Communication objects that note how they are called and forward to the framework's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcompat_conformance.framework import Framework


class _Comm:
    """What both have. ``calls`` are the keyword arguments of the calls; ``sizes``, ``dtypes`` and ``buffers`` are what
    was allocated."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.calls: list[dict[str, Any]] = []
        self.sizes: list[Any] = []
        self.dtypes: list[Any] = []
        self.buffers: list[Any] = []

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """A flat buffer of the one size."""
        self.sizes.append(tuple(size))
        self.dtypes.append(dtype)
        self.buffers.append(self.framework.empty(size, dtype=dtype, device=device))
        return self.buffers[-1]


class ForwardingAllGather(_Comm):
    """An all-gather."""

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.framework.all_gather(
            arguments["output_tensor"],
            arguments["input_tensor"],
            group=arguments["group"],
            async_op=arguments.get("async_op", False),
        )


class ForwardingReduceScatter(_Comm):
    """A reduce-scatter."""

    def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.framework.reduce_scatter(
            arguments["output_tensor"],
            arguments["input_tensor"],
            group=arguments["group"],
            op=arguments["op"],
            async_op=arguments.get("async_op", False),
        )
