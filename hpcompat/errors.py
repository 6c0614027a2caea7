"""Our few exception classes. Each is also the builtin class that FSDP2 raises there, so that either can be caught."""

from __future__ import annotations


class UserError(ValueError, AssertionError):
    """A caller's mistake that FSDP2 reports as ``AssertionError`` and that we report as ``ValueError``: it is both."""


class StateDictError(ValueError, RuntimeError):
    """A value that does not fit its parameter; torch raises ``RuntimeError`` for it."""


class CapabilityError(NotImplementedError):
    """The backend cannot do this; the message names the backend and the capability."""

    def __init__(self, *, backend: str, capability: str, hint: str) -> None:
        super().__init__(f"backend {backend!r} lacks the capability {capability!r}: {hint}")
        self.backend = backend
        self.capability = capability
