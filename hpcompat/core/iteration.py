"""What the units of one root share over an iteration: the root, the last-backward mark, the final callback.

The root is the first unit that runs forward; everything below it then belongs to it (ENT-13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcompat.core import events, failure
from hpcompat.core.states import TrainingState

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit


class Iteration:
    """Kept per root, never globally: two roots (pipeline stages) must not see each other's marks."""

    def __init__(self) -> None:
        # Units in module pre-order, without duplicates.
        self.units: list[Unit] = []
        # First unit entered in the running forward; it may be below the root, as when an encoder is evaluated alone.
        self.forward_root: Unit | None = None
        self.final_callback_queued = False
        # Groups that the explicit forward prefetch has gathered in the running forward.
        self.prefetched: list[ParamGroup] = []
        self.is_last_backward = True
        self.post_optim_event: Any = None

    def final_callback(self) -> None:
        """End of a backward: every unit has reduced, and after the last one nothing is pending."""
        if events.listeners:
            events.emit("final_callback", "", TrainingState.POST_BACKWARD, source=self.units[0] if self.units else None)
        self.final_callback_queued = False
        if self.forward_root is not None and not self.forward_root.is_running:
            self.forward_root = None
        for unit in self.units:
            unit.end_backward()
        if self.units:
            self.units[0].comm_ctx.end_backward(is_last=self.is_last_backward)
        if self.is_last_backward:
            for unit in self.units:
                for group in unit.groups:
                    group.finalize_backward()

    def reset(self) -> None:
        """After an exception: as if the failed iteration had never been (REC-07)."""
        if self.units:
            self.units[0].comm_ctx.reset()
        for unit in self.units:
            unit.reset_iter_state()
        self.forward_root = None
        self.prefetched.clear()
        self.final_callback_queued = False


def init_root(root: Unit, *, unit_of: Callable[[Any], Unit | None]) -> None:
    """Make ``root`` the root of every unit below it. ``unit_of`` gives the unit of a module.

    Raises:
        RuntimeError: ``root`` has several modules, or a unit below was the root of an earlier forward.
        ValueError: a parameter belongs to two param groups.
    """
    if len(root.modules) > 1:
        raise RuntimeError(
            f"{root.label} requires a single root module but got {len(root.modules)} modules: "
            f"{[type(module).__name__ for module in root.modules]}; run forward through a module that holds them all "
            "and is wrapped"
        )
    units = _collect_units(root, unit_of)
    _bind_names(root, units)
    _check_single_owner(units)
    for unit in units:
        for group in unit.groups:
            group.prepare()
    root.backend.check_ready(root.modules[0])
    # Only now, so that a refused forward can be mended and tried again.
    for unit in units:
        unit.is_root = unit is root
    _share(root, units)
    failure.watch(root)
    if root.auto_reshard_after_forward:
        # The root's parameters are the first that backward needs.
        for group in root.groups:
            group.post_forward_mesh_info = None


def _collect_units(root: Unit, unit_of: Callable[[Any], Unit | None]) -> list[Unit]:
    units: list[Unit] = []
    for name, module in root.backend.named_modules(root.modules[0]):
        unit = unit_of(module)
        if unit is None:
            continue
        if unit not in units:
            if unit is not root and unit.is_root is not None:
                raise RuntimeError(
                    f"{root.label} state has already been lazily initialized for {name}: expected one root per tree, "
                    f"but got a forward of {root.fqn!r} after one of {name!r}; run forward through the root module "
                    "first"
                )
            unit.fqn = name
            units.append(unit)
        else:
            unit.fqn = f"{unit.fqn}, {name}" if unit.fqn else name
    return units


def _share(root: Unit, units: list[Unit]) -> None:
    root.comm_ctx.lazy_init(root.backend.streams(root.device))
    iteration = root.iteration
    iteration.units = units
    caps = [group.max_input_buffers for unit in units for group in unit.groups]
    # A context shared with other roots keeps the largest cap of all.
    root.comm_ctx.max_input_buffers = max([root.comm_ctx.max_input_buffers, *caps])
    for unit in units:
        unit.iteration = iteration
        unit.set_comm_ctx(root.comm_ctx)


def _bind_names(root: Unit, units: list[Unit]) -> None:
    prefixes: dict[Any, str] = {}
    for name, module in root.backend.named_modules(root.modules[0]):
        prefixes.setdefault(module, f"{name}." if name else "")
    for unit in units:
        for group in unit.groups:
            group.fqn = unit.fqn
            group.tensors.bind_names(prefixes)


def _check_single_owner(units: list[Unit]) -> None:
    seen: dict[int, str] = {}
    for unit in units:
        for group in unit.groups:
            for uid, name in zip(group.tensors.uids, group.tensors.names, strict=True):
                if uid in seen:
                    raise ValueError(
                        f"Parameter {name!r} is shared with a parameter already managed by another FSDP group: "
                        f"expected every parameter in one unit, but got it as {seen[uid]!r} too. Put the modules that "
                        "share it into one unit: fully_shard([module_a, module_b])"
                    )
                seen[uid] = name
