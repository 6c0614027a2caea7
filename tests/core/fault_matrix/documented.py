"""The recipe of the documentation, as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hpcompat
from fault_matrix.cell import kit_of
from fault_matrix.kit import Site, Trap
from fault_matrix.points import point_of
from fault_matrix.settings import BY_ID
from fault_matrix.training import Script

PAGE = Path(__file__).parents[3] / "docs" / "recovery.md"
SETTING = "FSDP reshard=True, one batch"
NUM_STEPS = 6
_DUMMY = 1000


class Failure(NamedTuple):
    point: str
    unit: str
    rank: int


# By step.
FAILURES = {1: Failure("in forward", "first", 0), 4: Failure("node in backward", "middle", 1)}


def recipe() -> Callable[..., bool]:
    """``run_or_skip``, from the page's only block of Python."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    function: Callable[..., bool] = names["run_or_skip"]
    return function


def run(*, kit: str) -> None:
    """On 2 ranks: steps of which some fail on one rank leave what those leave that did not."""
    kept, weights = _train(kit, range(NUM_STEPS), fails=True)
    assert kept == [number for number in range(NUM_STEPS) if number not in FAILURES]
    assert _train(kit, kept, fails=False) == (kept, weights)


def _train(kit: str, numbers: Iterable[int], *, fails: bool) -> tuple[list[int], list[bytes]]:
    found, setting = kit_of(kit), BY_ID[SETTING]
    model = setting.wrap(found, found.net())
    traps = {number: Trap() for number in FAILURES}
    for number, failure in FAILURES.items():
        point_of(failure.point).in_place(Site(found, model, failure.unit, traps[number]))
    script = Script(found, setting, model, optimizer="adamw", trap=Trap())
    run_or_skip, kept = recipe(), []
    for number in numbers:
        if fails and number in FAILURES and FAILURES[number].rank == hpcompat.get_rank():
            traps[number].set()
        model.zero_grad()
        if run_or_skip(model, partial(script.run, number), dummy_step=partial(script.run, _DUMMY)):
            kept.append(number)
            found.step(script.optimizer)
    return kept, [hpcompat.to_numpy(weight).tobytes() for weight in hpcompat.parameters(model)]
