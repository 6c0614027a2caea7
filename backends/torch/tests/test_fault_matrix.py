"""The fault matrix on torch, and the negative controls that turn it red."""

from __future__ import annotations

import pytest

from fault_matrix import suite
from fault_matrix.plants import PLANTS
from hpcompat_conformance.pool import PoolSet

KIT = "fault_kits:Torch"


@pytest.mark.parametrize(("setting", "who"), suite.MATRIX)
def test_a_failed_step_leaves_no_trace(pool: PoolSet, setting: str, who: str) -> None:
    suite.check_matrix(pool, kit=KIT, setting=setting, who=who)


@pytest.mark.parametrize("who", ["all", "one"])
def test_with_another_optimizer(pool: PoolSet, who: str) -> None:
    suite.check_matrix(pool, kit=KIT, setting="FSDP reshard=True, one batch", who=who, optimizer="sgd")


@pytest.mark.parametrize(("setting", "who"), suite.EVENTS)
def test_a_step_may_fail_at_any_event(pool: PoolSet, setting: str, who: str) -> None:
    suite.check_events(pool, kit=KIT, setting=setting, who=who)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_reset_forgets_shows(pool: PoolSet, plant: str) -> None:
    suite.check_plant(pool, kit=KIT, plant=plant)


def test_the_documented_recipe(pool: PoolSet) -> None:
    pool(2).run("fault_matrix.documented:run", kit=KIT)


@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize("kit", ["Checkpointed", "Offloaded"])
def test_recomputation_and_offload(pool: PoolSet, kit: str, who: str) -> None:
    suite.check_events(pool, kit=f"fault_kits:{kit}", setting="FSDP reshard=True, sync off, then on", who=who)
