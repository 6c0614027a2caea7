"""What outputs must be like for backward to find the units that they come from."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedUnit


def check_hidden_tensors(unit: HookedUnit, *, owner: str | None, beside_shown: bool) -> None:
    """``owner`` is the type of an object in the unit's output that holds tensors where hooks cannot be put.

    Raises:
        TypeError: no other tensor is there, so that nothing would gather the parameters for backward (FWD-02). Beside
            others, as in a cache of keys and values, it does no harm by itself: a warning.
    """
    if owner is None:
        return
    whose = f"the output of unit {unit.fqn!r} ({type(unit.modules[0]).__name__})"
    if not beside_shown:
        raise TypeError(
            f"expected {whose} to hold its tensors in dicts, lists, tuples or dataclasses, but got a {owner} that "
            f"hides tensors: backward could not gather the parameters. Return the tensors, or make {owner} a dataclass"
        )
    warnings.warn(
        f"{whose} has a {owner} that hides tensors beside those that it shows. Gradients must come through the shown "
        f"ones first: they gather the parameters for backward. Detach the tensors in it, or make {owner} a dataclass",
        UserWarning,
        stacklevel=5,
    )
