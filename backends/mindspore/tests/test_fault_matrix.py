"""The fault matrix on MindSpore, and the negative controls that turn it red."""

from __future__ import annotations

import pytest

from fault_matrix import suite
from fault_matrix.plants import PLANTS
from hpcompat_conformance.pytest_plugin import Ranks

KIT = "ms_fault_kit:MindSpore"


@pytest.mark.parametrize("place", suite.places())
def test_a_failed_step_leaves_no_trace(ranks: Ranks, place: suite.Place) -> None:
    suite.check_place(ranks, place, kit=KIT)


@pytest.mark.parametrize("place", suite.places(setting="FSDP reshard=True, one batch", strength=1))
def test_with_another_optimizer(ranks: Ranks, place: suite.Place) -> None:
    suite.check_place(ranks, place, kit=KIT, optimizer="sgd")


@pytest.mark.parametrize(("setting", "who", "half"), suite.EVENTS)
def test_a_step_may_fail_at_any_event(ranks: Ranks, setting: str, who: str, half: int) -> None:
    suite.check_events(ranks, kit=KIT, setting=setting, who=who, half=half)


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_reset_forgets_shows(ranks: Ranks, plant: str) -> None:
    suite.check_plant(ranks, kit=KIT, plant=plant)


def test_the_documented_recipe(ranks: Ranks) -> None:
    ranks(2).run("fault_matrix.documented:run", kit=KIT)


@pytest.mark.parametrize("place", suite.places(setting="FSDP reshard=True, value_and_grad"))
def test_with_mindspores_own_value_and_grad(ranks: Ranks, place: suite.Place) -> None:
    suite.check_place(ranks, place, kit="ms_fault_kit:MindSporesOwn")


@pytest.mark.parametrize("place", suite.places(setting="FSDP reshard=True, sync off"))
def test_with_queued_operations(ranks: Ranks, place: suite.Place) -> None:
    """As MindSpore does by itself: operations run, and raise, later than they are called."""
    suite.check_place(lambda num_ranks: ranks(num_ranks, queued=True), place, kit=KIT)
