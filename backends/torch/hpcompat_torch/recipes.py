"""How torch's optimizers fill the lists that they update, learned from one step and repeated without them.

[Note: recipes]
Torch's element-wise classes collect what they update in ``_init_group``: into one list of parameters, one of gradients,
and one per kind of state. Once the parameters have states, it is known which state fills which list. The lists of local
tensors are then filled from the distributed ones directly, which costs no more than torch's own way over plain tensors.
Nothing is kept between steps but the names of the states: what a user replaces or loads counts at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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
    """Runs for every parameter in every step: no call per parameter that is not needed."""
    if _options(group) != recipe.options or isinstance(group.get("lr"), torch.Tensor):
        return None
    members: list[Any] = []
    locals_: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for parameter in group["params"]:
        grad = parameter.grad
        if grad is None:
            if getattr(parameter, "main_grad", None) is not None:
                return None
            continue
        local = parameter
        if type(parameter) is DTensor:
            if type(grad) is not DTensor or not (grad._spec is parameter._spec or is_placed_alike(grad, parameter)):
                return None
            local, grad = parameter._local_tensor, grad._local_tensor
        elif grad.is_sparse:
            return None
        members.append(parameter)
        locals_.append(local)
        grads.append(grad)
    if not (_are_plain(locals_) and _are_plain(grads)):
        return None
    if recipe.keys is None:
        return None if members else ()
    return _with_states(recipe.keys, members, states, (locals_, grads))


def _with_states(keys: tuple[str | None, ...], members: list[Any], states: Any, lists: Lists) -> Lists | None:
    if not any(keys):
        return lists
    found = list(map(states.get, members))
    if not all(found):  # a first gradient, or a state that was cleared
        return None
    for key in keys:
        values = [] if key is None else _states(key, members, found)
        if values is None:
            return None
        lists = (*lists, values)
    return lists


def _states(key: str, members: list[Any], found: list[State]) -> list[Any] | None:
    values: list[Any] = [state.get(key) for state in found]
    if key in SCALAR_STATES:
        return values if _are_plain(values) else None
    specs = map(_spec_of, values)
    if {*map(type, values), *map(type, members)} == {DTensor} and all(map(is_, specs, map(_spec_of, members))):
        values = [value._local_tensor for value in values]
    else:
        values = list(map(_local_state, values, members))
    return values if _are_plain(values) else None


def _local_state(value: Any, parameter: Any) -> Any:
    """None where the two are distributed in different ways."""
    if type(value) is not DTensor:
        return value
    return value._local_tensor if type(parameter) is DTensor and is_placed_alike(value, parameter) else None


def _are_plain(tensors: list[Any]) -> bool:
    return PLAIN.issuperset(map(type, tensors))
