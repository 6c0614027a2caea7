"""What one unit does, on one rank in this process and on several in the pool."""

from __future__ import annotations

from typing import Any

import pytest

from behaviour import frozen, gaps, gradients, identity, loading, options, outputs, recovery, states
from behaviour.registry import Behaviour, behaviours_of
from hpcompat_conformance.pool import PoolSet

ALL = behaviours_of(identity, outputs, states, loading, gradients, frozen, options, recovery, gaps)


def as_test(behaviour: Behaviour) -> Any:
    marks = [pytest.mark.xfail(reason=behaviour.gap, strict=True)] if behaviour.gap else []
    return pytest.param(behaviour, id=behaviour.id, marks=marks)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("behaviour", [as_test(found) for found in ALL])
def test_behaviour(behaviour: Behaviour, pool: PoolSet) -> None:
    if behaviour.world_size == 1:
        behaviour.function(**behaviour.arguments)
    else:
        pool(behaviour.world_size).run(behaviour.function, **behaviour.arguments)
