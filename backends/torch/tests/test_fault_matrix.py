"""The fault matrix on torch, and the negative controls that turn it red."""

from __future__ import annotations

import pytest

from fault_matrix import suite
from fault_matrix.plants import PLANTS
from hpcompat_conformance.pool import PoolSet

KIT = "fault_kits:Torch"


@pytest.mark.parametrize("place", suite.places())
def test_a_failed_step_leaves_no_trace(pool: PoolSet, place: suite.Place) -> None:
    suite.check_place(pool, place, kit=KIT)


@pytest.mark.parametrize("place", suite.places(setting="FSDP reshard=True, one batch", strength=1))
def test_with_another_optimizer(pool: PoolSet, place: suite.Place) -> None:
    suite.check_place(pool, place, kit=KIT, optimizer="sgd")


@pytest.mark.parametrize(("setting", "who", "half"), suite.EVENTS)
def test_a_step_may_fail_at_any_event(pool: PoolSet, setting: str, who: str, half: int) -> None:
    suite.check_events(pool, kit=KIT, setting=setting, who=who, half=half)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_reset_forgets_shows(pool: PoolSet, plant: str) -> None:
    suite.check_plant(pool, kit=KIT, plant=plant)


def test_the_documented_recipe(pool: PoolSet) -> None:
    pool(2).run("fault_matrix.documented:run", kit=KIT)


@pytest.mark.parametrize(("setting", "who", "half"), suite.halves("FSDP reshard=True, sync off, then on"))
@pytest.mark.parametrize("kit", ["Checkpointed", "Offloaded"])
def test_recomputation_and_offload(pool: PoolSet, kit: str, setting: str, who: str, half: int) -> None:
    suite.check_events(pool, kit=f"fault_kits:{kit}", setting=setting, who=who, half=half)
