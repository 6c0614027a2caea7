"""What code that knows FSDP2 by torch's own names finds on our modules: their kind, and their state.

Trainers, pipeline schedules and checkpointers ask ``isinstance(module, FSDPModule)``, ``fully_shard.state(module)`` or
torch's registry of composable APIs. Our modules are of that kind, with every method ours, and the state that they are
asked for is a view: it holds nothing and passes what is asked on to the unit. Nothing here runs torch's FSDP2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import fsdp

from hpcompat.core.unit import unit_of
from hpcompat.errors import CapabilityError
from hpcompat_torch.private import REGISTRY_KEY, STATE_KEY, RegistryItem

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit

try:
    from torch.distributed._composable import replicate_with_fsdp
except ImportError:  # before torch 2.9
    replicate_with_fsdp = None  # type: ignore[assignment]

NativeModule: type = fsdp.FSDPModule
NativeReplicateModule: type = getattr(replicate_with_fsdp, "ReplicateModule", NativeModule)


class GroupView:
    """One param group, as ``torch.distributed.pipelining`` uses it."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group

    def post_backward(self, *unused: Any) -> None:
        """Reduce what the group has accumulated, unless its gradient sync is off."""
        self._group.post_backward()

    def __getattr__(self, name: str) -> Any:
        raise _no_such("param group", name)


class ContextView:
    """What the states of one root share."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def all_states(self) -> list[StateView]:
        """One state per unit, in the order of the root's modules; before the first forward the unit's own alone."""
        return [StateView(unit) for unit in self._unit.iteration.units or [self._unit]]

    @property
    def is_last_backward(self) -> bool:
        return self._unit.iteration.is_last_backward

    def __getattr__(self, name: str) -> Any:
        raise _no_such("state context", name)


class StateView:
    """One unit, as torch's ``fully_shard.state(module)`` and ``replicate.state(module)`` show it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _state_ctx(self) -> ContextView:
        return ContextView(self._unit)

    @property
    def _fsdp_param_groups(self) -> list[GroupView]:
        return [GroupView(group) for group in self._unit.groups]

    @property
    def _fsdp_param_group(self) -> GroupView | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    @property
    def _is_root(self) -> bool | None:
        return self._unit.is_root

    def _root_post_backward_final_callback(self) -> None:
        """End a backward whose reductions were started by hand: every gradient is on its shard afterwards."""
        self._unit.iteration.final_callback()

    def __getattr__(self, name: str) -> Any:
        raise _no_such("state", name)


def _no_such(what: str, name: str) -> AttributeError:
    return AttributeError(
        f"hpcompat's view of FSDP2's {what} has no {name!r}: it shows what torch.distributed.pipelining reads, not the "
        "internals of torch's own implementation; use the methods of the module"
    )


def register(unit: Unit, *, is_replicated: bool) -> None:
    """Let torch's composable APIs know the modules of ``unit``, as they know those of its own ``fully_shard``."""
    call: Any = getattr(replicate_with_fsdp, "replicate", None) if is_replicated else fsdp.fully_shard
    if call is None:
        return
    name, key = call.__name__, call.__wrapped__
    for module in unit.modules:
        vars(module).setdefault(REGISTRY_KEY, {})[name] = RegistryItem()
        vars(module).setdefault(STATE_KEY, {})[key] = StateView(unit)


def refuse_unknown_methods(mixin: type, ours: type) -> None:
    """Give ``mixin`` an error by name for each method of torch's ``FSDPModule`` that neither it nor ``ours`` has.

    Torch's own would fail on a state that our modules do not have.
    """
    for native in {NativeModule, NativeReplicateModule}:
        for name, member in vars(native).items():
            if not name.startswith("__") and callable(member) and not hasattr(ours, name) and name not in vars(mixin):
                setattr(mixin, name, _refusal(name))


def _refusal(name: str) -> Any:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise CapabilityError(
            backend="torch",
            capability=f"{name}()",
            hint=f"a method of FSDPModule in torch {torch.__version__} that hpcompat does not know; leave the call out",
        )

    return refuse


def state_of(module: nn.Module) -> StateView:
    unit = unit_of(module)
    assert unit is not None
    return StateView(unit)
