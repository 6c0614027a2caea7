"""How torch's optimizers fill the lists that they update, learned from one step and repeated without them.

[Note: recipes]
Torch's element-wise classes collect what they update in ``_init_group``: into one list of parameters, one of gradients,
and one per kind of state. Once the parameters have states, it is known which state fills which list. The lists of local
tensors are then filled from the distributed ones directly, which costs no more than torch's own way over plain tensors.
Nothing is kept between steps but the names of the states: what a user replaces or loads counts at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from hpcompat_torch.local import PLAIN, is_placed_alike, local_of

State = dict[str, Any]
Group = dict[str, Any]
Lists = tuple[list[Any], ...]

# States that belong to a parameter but not to its elements.
SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})

_spec_of = attrgetter("_spec")
_local_tensor_of = attrgetter("_local_tensor")


class Recipe(NamedTuple):
    """How to fill the lists of one group."""

    options: Group
    # Per list after those of parameters and gradients the state that fills it, None for one that stays empty. None in
    # place of all: not known, for no parameter had a gradient.
    keys: tuple[str | None, ...] | None
    result: Any
    foreach: Any


_recipes: weakref.WeakKeyDictionary[Optimizer, list[Recipe | None]] = weakref.WeakKeyDictionary()


class Collected(NamedTuple):
    """What torch's ``_init_group`` did for one group of local tensors."""

    group: Group
    lists: Lists
    result: Any
    foreach: Any


def learn(optimizer: Optimizer, collected: Sequence[Collected]) -> None:
    """Remember how the lists were filled; after the update, when all states are there."""
    _recipes[optimizer] = [_recipe(optimizer.state, *found) for found in collected]


def fill(optimizer: Optimizer) -> list[tuple[Recipe, Lists]] | None:
    """The lists of every group, or None if torch has to collect some (states are missing, options have changed)."""
    recipes = _recipes.get(optimizer)
    if recipes is None or len(recipes) != len(optimizer.param_groups):
        return None
    filled = []
    for group, recipe in zip(optimizer.param_groups, recipes, strict=True):
        lists = None if recipe is None else _lists(recipe, group, optimizer.state)
        if recipe is None or lists is None:
            return None
        filled.append((recipe, lists))
    return filled


def _recipe(states: dict[Any, State], group: Group, lists: Lists, result: Any, foreach: Any) -> Recipe | None:
    options = _options(group)
    found_complex_or_sparse = any(result) if isinstance(result, tuple) else bool(result)
    if found_complex_or_sparse or any(
        isinstance(value, torch.Tensor) for value in (*options.values(), group.get("lr"))
    ):
        return None
    members = [states.get(parameter, {}) for parameter in group["params"] if parameter.grad is not None]
    if not members:
        return Recipe(options, None, result, foreach)
    keys: list[str | None] = []
    for values in lists[2:]:
        key = next((key for key, value in members[0].items() if values and local_of(value) is values[0]), None)
        as_named = len(values) == len(members) and all(
            local_of(state.get(key)) is value for state, value in zip(members, values, strict=True)
        )
        if values and (key is None or not as_named):
            return None
        keys.append(key)
    return Recipe(options, tuple(keys), result, foreach)


def _options(group: Group) -> Group:
    """What decides which lists there are; the learning rate does not and changes often."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _lists(recipe: Recipe, group: Group, states: Any) -> Lists | None:
    """Runs over every parameter in every step: in passes over all of them, which make no call for each in Python."""
    if _options(group) != recipe.options or isinstance(group.get("lr"), torch.Tensor):
        return None
    members: list[Any] = group["params"]
    grads: list[Any] = [parameter.grad for parameter in members]
    if type(None) in {*map(type, grads)}:
        pairs = list(zip(members, grads, strict=True))
        if any(grad is None and getattr(parameter, "main_grad", None) is not None for parameter, grad in pairs):
            return None
        members = [parameter for parameter, grad in pairs if grad is not None]
        grads = [grad for grad in grads if grad is not None]
    if recipe.keys is None:
        return None if members else ()
    specs = [*map(_spec_of, members)] if {*map(type, members)} == {DTensor} else None
    locals_ = [*map(_local_tensor_of, members)] if specs is not None else [*map(_local_if_dtensor, members)]
    local_grads = _local_parts(grads, members, specs, part=_local_gradient)
    if not (_are_plain(locals_) and _are_plain(local_grads)):
        return None
    return _with_states(recipe.keys, members, specs, states, (locals_, local_grads))


def _with_states(
    keys: tuple[str | None, ...], members: list[Any], specs: list[Any] | None, states: Any, lists: Lists
) -> Lists | None:
    if not any(keys):
        return lists
    found = [*map(states.get, members)]
    if not all(found):  # a first gradient, or a state that was cleared
        return None
    for key in keys:
        values = [] if key is None else [state.get(key) for state in found]
        if key is not None and key not in SCALAR_STATES:
            values = _local_parts(values, members, specs, part=_local_state)
        if not _are_plain(values):
            return None
        lists = (*lists, values)
    return lists


def _local_parts(
    values: list[Any], members: list[Any], specs: list[Any] | None, *, part: Callable[[Any, Any], Any]
) -> list[Any]:
    """The local tensors of the parameters' gradients or states. ``specs`` are the parameters', if all are DTensors."""
    if specs is not None and {*map(type, values)} == {DTensor} and all(map(is_, specs, map(_spec_of, values))):
        return [*map(_local_tensor_of, values)]
    return [*map(part, values, members)]


# One by one; None where torch has to do it


def _local_gradient(grad: Any, parameter: Any) -> Any:
    if type(parameter) is DTensor:
        return grad._local_tensor if type(grad) is DTensor and is_placed_alike(grad, parameter) else None
    return None if grad.is_sparse else grad


def _local_state(value: Any, parameter: Any) -> Any:
    if type(value) is not DTensor:
        return value
    return value._local_tensor if type(parameter) is DTensor and is_placed_alike(value, parameter) else None


def _local_if_dtensor(parameter: Any) -> Any:
    return parameter._local_tensor if type(parameter) is DTensor else parameter


def _are_plain(tensors: list[Any]) -> bool:
    return PLAIN.issuperset(map(type, tensors))
