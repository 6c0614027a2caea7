"""What one unit does, on one rank in this process and on several in the pool."""

from __future__ import annotations

import pytest

from behaviour import (
    containers,
    edges,
    frozen,
    gradients,
    identity,
    kind,
    loading,
    options,
    outputs,
    passes,
    recovery,
    states,
    transport,
)
from behaviour.registry import Behaviour, behaviours_of, run
from hpcompat_conformance.pool import PoolSet

ALL = behaviours_of(
    containers,
    edges,
    frozen,
    gradients,
    identity,
    kind,
    loading,
    options,
    outputs,
    passes,
    recovery,
    transport,
    states,
)


# Recurrent layers return views; what that warning says is checked where it is expected.
@pytest.mark.filterwarnings("ignore:.*is a view:UserWarning")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("behaviour", ALL)
def test_behaviour(behaviour: Behaviour, pool: PoolSet) -> None:
    run(behaviour, pool)
