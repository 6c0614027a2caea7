"""Collectives and meshes over MPI."""

from __future__ import annotations

import pytest

from hpcompat_conformance.pytest_plugin import Ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_reductions_give_the_bits_of_gloo(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks).run("ms_collectives:same_bits_as_gloo")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("job", ["gathers", "many_in_flight"])
def test_collectives(ranks: Ranks, job: str, num_ranks: int) -> None:
    ranks(num_ranks).run(f"ms_collectives:{job}")


@pytest.mark.parametrize("job", ["meshes", "some_ranks_make_a_group", "rank_outside_a_mesh"])
def test_meshes(ranks: Ranks, job: str) -> None:
    ranks(4).run(f"ms_collectives:{job}")
