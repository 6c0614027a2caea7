"""The little that differs between frameworks: what `decoder_<backend>.py` must define.

The module itself is the implementation; there is no class to derive from. Everything else that the loop needs of a
framework it calls in hpcompat.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, cast

from options import Options


class PeakProbe(Protocol):
    """Watches how many bytes of parameters are unsharded at the same time, until closed."""

    peak_bytes: int

    def close(self) -> None: ...


class Framework(Protocol):
    """Models and tensors are opaque to the loop, but a sharded model has the methods of `hpcompat.HSDPModule`."""

    COMPUTE_DTYPES: Mapping[str, Any]
    """What `fully_shard` takes as `param_dtype` for each choice of `--dtype`."""
    REDUCE_DTYPE: Any

    def prepare(self) -> None:
        """Let every run compute the same bits, where the framework has to be told."""

    def build_model(self, options: Options) -> Any:
        """The whole decoder, with the weights of `weights.initial_weights`."""

    def cross_entropy(self, logits: Any, targets: Any) -> Any:
        """The mean over (batch, seq) targets of logits of shape (batch, seq, VOCABULARY), computed in fp32."""

    def watch_unsharded_bytes(self, model: Any) -> PeakProbe: ...

    def end_process(self, exit_code: int) -> NoReturn: ...


def load_framework(backend: str) -> Framework:
    return cast(Framework, importlib.import_module(f"decoder_{backend}"))


def load_library(name: str) -> Any:
    """What trains: "hpcompat", or "native" for an object with the same functions that does without hpcompat."""
    return importlib.import_module({"hpcompat": "hpcompat", "native": "native_torch"}[name])
