"""Steps, norms and zeroing over sharded parameters, on one rank in this process and on several in the pool."""

from __future__ import annotations

import pytest

from behaviour.registry import Behaviour, behaviours_of, run
from hpcompat_conformance.pool import PoolSet
from optimizers import (
    around,
    clipping,
    containers,
    decoder,
    element,
    foreign,
    kernel_choice,
    norms,
    scaling,
    states,
    steps,
    zeroing,
)

ALL = behaviours_of(
    steps, kernel_choice, around, states, containers, norms, clipping, scaling, zeroing, foreign, element, decoder
)


# What that warning says is checked where it is expected.
@pytest.mark.filterwarnings("ignore:.*keeps its states in:UserWarning")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("behaviour", ALL)
def test_behaviour(behaviour: Behaviour, pool: PoolSet) -> None:
    run(behaviour, pool)
