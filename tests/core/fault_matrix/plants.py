"""Ways to forget something in ``reset_iter_state``. Each must turn the matrix red, where ``cells`` says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hpcompat.core.comm_ctx import CommContext
from hpcompat.core.iteration import Iteration
from hpcompat.core.param_group import ParamGroup
from hpcompat.core.unit import Unit


@dataclass(frozen=True)
class Plant:
    """``owner`` keeps ``attribute`` when it is reset; of its tensors, if ``of_tensors``, the method does nothing."""

    owner: type
    attribute: str
    setting: str
    point: str
    unit: str
    of_tensors: bool = False

    def planted(self) -> AbstractContextManager[Any]:
        name = "reset" if self.owner in (CommContext, Iteration) else "reset_iter_state"
        original = getattr(self.owner, name)
        keep = _without_call if self.of_tensors else _keeping

        def forgetful(owner: Any) -> None:
            with keep(owner, self.attribute):
                original(owner)

        return mock.patch.object(self.owner, name, forgetful)


@contextmanager
def _keeping(owner: Any, attribute: str) -> Iterator[None]:
    kept = getattr(owner, attribute)
    if isinstance(kept, list | set | deque):
        setattr(owner, attribute, type(kept)())
    yield
    setattr(owner, attribute, kept)


@contextmanager
def _without_call(group: Any, method: str) -> Iterator[None]:
    state = group.sharded_state
    with mock.patch.object(group.tensors, method):
        yield
    if method == "to_sharded":
        group.sharded_state = state


_FSDP, _NO_SYNC = "FSDP reshard=True, one batch", "FSDP reshard=True, sync off"

PLANTS: dict[str, Plant] = {
    "gradients without sync": Plant(ParamGroup, "drop_gradients", _NO_SYNC, "before backward", "root", of_tensors=True),
    "unsharded parameters": Plant(ParamGroup, "to_sharded", _FSDP, "in forward", "middle", of_tensors=True),
    "gathers in flight": Plant(ParamGroup, "_gather", _FSDP, "in forward", "first"),
    "reductions in flight": Plant(CommContext, "_reductions", _FSDP, "node in backward", "first"),
    "the order of forwards": Plant(CommContext, "post_forward_order", _FSDP, "before backward", "root"),
    "the queued callback": Plant(Iteration, "final_callback_queued", _FSDP, "node in backward", "middle"),
    "the state of a unit": Plant(Unit, "training_state", _FSDP, "in forward", "middle"),
}


def planted(name: str | None) -> AbstractContextManager[Any]:
    """With the bug of that name, if any."""
    return nullcontext() if name is None else PLANTS[name].planted()
