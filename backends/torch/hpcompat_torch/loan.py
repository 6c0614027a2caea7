"""An optimizer's parameters, gradients and states as local tensors, for the length of one update.

[Note: lending]
The update of an element-wise optimizer needs no communication: on local tensors it computes what it would compute on
distributed ones. So for its length the optimizer has, in place of each distributed parameter, its local tensor, with
the local gradient and with states in the memory of the distributed ones. Everything around the update (hooks, closure,
profiler, schedulers) runs as in any other step and sees the optimizer as it is: the loan begins when the update asks
for its first group of tensors, after the pre-hooks and the closure, and ends before the first post-hook. States that
the update has made are kept as what it would have made of the distributed parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from hpcompat_torch import recipes
from hpcompat_torch.kernels import takes_foreach
from hpcompat_torch.local import distributed_like, gradient_of, is_placed_alike, local_of, settled_gradient
from hpcompat_torch.recipes import SCALAR_STATES, Collected, Group, State

_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})

_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class _Lent(NamedTuple):
    """One parameter that takes part; ``local`` is the parameter itself if it is plain."""

    parameter: torch.Tensor
    local: torch.Tensor
    own_grad: torch.Tensor | None
    given: State


class Loan:
    """What one step borrows, from its first use of ``_init_group`` until it is closed. [Note: lending]"""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_open = False
        self._state: Any = None
        self._groups: list[tuple[Group, list[torch.Tensor], Any]] = []
        self._lent: list[_Lent] = []
        self._collected: list[Collected] = []
        optimizer._init_group = self._first_group

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first step post-hook."""
        self.close(keep=True)

    def _first_group(self, group: Group, *lists: list[Any]) -> Any:
        self._open()
        return self._optimizer._init_group(group, *lists)

    def _open(self) -> None:
        optimizer = self._optimizer
        filled = recipes.fill(optimizer)
        self._state, self._is_open = optimizer.state, True
        self._groups = [(group, group["params"], group.get("foreach")) for group in optimizer.param_groups]
        if filled is None:
            optimizer._init_group = self._collect
            optimizer.state = defaultdict(dict)
            self._lend_all()
            return
        remaining = iter(filled)

        def hand_over(group: Group, *lists: list[Any]) -> Any:
            recipe, values = next(remaining)
            for target, value in zip(lists, values, strict=False):
                target.extend(value)
                value.clear()  # now, while the tensors are in the cache
            return recipe.result

        for group, (recipe, _) in zip(optimizer.param_groups, filled, strict=True):
            _set_foreach(group, recipe.foreach)
        optimizer._init_group = hand_over
        # SGD sets the momentum that it was given once more: here, where nobody looks.
        optimizer.state = defaultdict(dict)

    def close(self, *, keep: bool) -> None:
        """Take everything back and ``keep`` the states that are new. Does nothing the second time."""
        optimizer = self._optimizer
        vars(optimizer).pop("_init_group", None)
        if not self._is_open:
            return
        self._is_open = False
        for group, params, foreach in self._groups:
            group["params"] = params
            _set_foreach(group, foreach)
        local_states, optimizer.state = optimizer.state, self._state
        for lent in self._lent:
            if lent.local is not lent.parameter:
                lent.local.grad = lent.own_grad
        if keep and self._collected:
            self._keep_states(local_states)
            recipes.learn(optimizer, self._collected)

    # The long way, over torch's own ``_init_group``

    def _lend_all(self) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            members = [parameter for parameter in group["params"] if gradient_of(parameter) is not None]
            group["params"] = [self._lend(parameter, optimizer.state) for parameter in members]
            if takes_foreach(optimizer, group, group["params"]):
                group["foreach"] = True

    def _lend(self, parameter: torch.Tensor, local_states: dict[Any, State]) -> torch.Tensor:
        state: State | None = self._state.get(parameter)
        local, grad = local_of(parameter), settled_gradient(parameter)
        assert grad is not None
        if local is parameter and grad is parameter.grad:
            if state is not None:
                local_states[parameter] = state
            self._lent.append(_Lent(parameter, parameter, None, {}))
            return parameter
        if local is parameter:  # plain, with a main_grad
            local = local.detach()
        own_grad = local.grad
        # A main_grad keeps the dtype of the reduction.
        local.grad = grad if grad.dtype is local.dtype else grad.to(local.dtype)
        given = {key: _local_state(parameter, key, value) for key, value in (state or {}).items()}
        if given:
            local_states[local] = dict(given)
        self._lent.append(_Lent(parameter, local, own_grad, given))
        return local  # type: ignore[no-any-return]

    def _collect(self, group: Group, *lists: list[Any]) -> Any:
        """Torch's ``_init_group``, watched."""
        result = type(self._optimizer)._init_group(self._optimizer, group, *lists)
        self._collected.append(Collected(group, lists, result, group.get("foreach")))
        return result

    def _keep_states(self, local_states: dict[Any, State]) -> None:
        for parameter, local, _, given in self._lent:
            made = local_states.get(local)
            if made is None:
                continue
            _warn_if_imprecise(self._optimizer, made)
            if local is parameter:
                self._state[parameter] = made
                continue
            state = self._state[parameter]
            for key, value in made.items():
                if given.get(key) is value:
                    continue
                is_scalar = key in SCALAR_STATES or not isinstance(value, torch.Tensor)
                state[key] = value if is_scalar else distributed_like(parameter, value)


def _set_foreach(group: Group, foreach: Any) -> None:
    if "foreach" in group:
        group["foreach"] = foreach


def _local_state(parameter: torch.Tensor, key: str, value: Any) -> Any:
    if isinstance(value, DTensor) and isinstance(parameter, DTensor) and not is_placed_alike(value, parameter):
        raise ValueError(
            f"expected state {key!r} on the mesh and with the placements of its parameter, {parameter.device_mesh} "
            f"{parameter.placements}, but got {value.device_mesh} {value.placements}; load one distributed alike"
        )
    return local_of(value)


def _warn_if_imprecise(optimizer: Optimizer, state: State) -> None:
    dtype = state["exp_avg"].dtype if "exp_avg" in state else None
    if dtype in _LOW_PRECISION and optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} keeps its states in {dtype}, the dtype of the parameters: small updates round "
            "to nothing, and training may level off early. Keep the parameters in float32 and compute in "
            f"{dtype} with MixedPrecisionPolicy(param_dtype={dtype})",
            UserWarning,
            stacklevel=8,
        )
