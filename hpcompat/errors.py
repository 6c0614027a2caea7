"""Our few exception classes. Each is also the builtin class that FSDP2 raises there, so that either can be caught."""

from __future__ import annotations

from collections.abc import Mapping

# The shape that was expected, the one that was found, and whether that is the shape of this rank's part.
Misfit = tuple[tuple[int, ...], tuple[int, ...], bool]
LOCAL_ADVICE = (
    ", the shape of this rank's part; every rank that loads one file would hold the same rows. Where each rank has "
    "saved its own, call hpcompat.load_local_state_dict"
)


class UserError(ValueError, AssertionError):
    """A caller's mistake that FSDP2 reports as ``AssertionError`` and that we report as ``ValueError``: it is both."""


class StateDictError(ValueError, RuntimeError):
    """A value that does not fit its parameter; torch raises ``RuntimeError`` for it."""

    @classmethod
    def of_shapes(cls, module: str, misfits: Mapping[str, Misfit], *, are_local: bool = False) -> StateDictError:
        """The values in ``misfits``, by name, have other shapes than ``module`` takes: global ones, or this rank's if
        ``are_local``. Begins as torch does.
        """
        lines = cls.lines(misfits, are_local=are_local)
        return cls(f"Error(s) in loading state_dict for {module}:\n\t" + "\n\t".join(lines))

    @staticmethod
    def lines(misfits: Mapping[str, Misfit], *, are_local: bool = False) -> list[str]:
        """One for each value."""
        kind = "local" if are_local else "global"
        return [
            f"size mismatch for {name}: expected a value of the {kind} shape {expected}, but got {found}"
            + (LOCAL_ADVICE if is_local else "")
            for name, (expected, found, is_local) in misfits.items()
        ]


def shared_parameter(name: str, other: str) -> ValueError:
    """For a parameter of two units, ``name`` in one and ``other`` in the other."""
    return ValueError(
        f"Parameter {name!r} is shared with a parameter already managed by another FSDP group: expected every "
        f"parameter in one unit, but got it as {other!r} too. Put the modules that share it into one unit: "
        "fully_shard([module_a, module_b]); or wrap a module that two others hold by itself, before them"
    )


class CapabilityError(NotImplementedError):
    """The backend cannot do this; the message names the backend and the capability."""

    def __init__(self, *, backend: str, capability: str, hint: str) -> None:
        super().__init__(f"backend {backend!r} lacks the capability {capability!r}: {hint}")
        self.backend = backend
        self.capability = capability


class CollectiveError(RuntimeError):
    """A collective that could not be completed: another rank has ended, or did not come in time.

    The message says which collective of which unit; ``__cause__`` is the error of the transport. The process group is
    lost with it: there is no way on but to start the job again.

    ``collective`` is ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"`` or the name of the call; ``unit`` is the
    qualified name of the unit, ``""`` for the root and ``None`` where it belongs to no unit.
    """

    def __init__(self, message: str, *, collective: str = "", unit: str | None = None) -> None:
        super().__init__(message)
        self.collective = collective
        self.unit = unit
