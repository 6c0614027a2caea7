"""Streams of an accelerator, by capability: whatever ``torch.accelerator`` calls the current one has them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpcompat.core.comm_ctx import NULL_STREAM, NullStreams


class DeviceStreams:
    """The streams of one accelerator."""

    available = True

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def current(self) -> Any:
        return self._module.current_stream()

    def create(self, *, high_priority: bool) -> Any:
        return self._module.Stream(priority=-1 if high_priority else 0)


def has_streams(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


def streams_of(device: torch.device) -> DeviceStreams | NullStreams:
    return DeviceStreams(device) if has_streams(device) else NullStreams()


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Run on ``stream``; nothing to do where there are none."""
    return nullcontext() if stream is NULL_STREAM else torch.get_device_module(device).stream(stream)


def current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream()
