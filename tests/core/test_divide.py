"""By what, when and with which reduction gradients are divided (RED-01 to RED-04, RED-06, RED-10)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcompat.comm import ReduceOp
from hpcompat.contract.scheduler import DividePlan
from hpcompat.core.divide import DivideRequest, divide_plan

SUM, AVG, PREMUL = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM
ALL = frozenset(ReduceOp)
NO_PREMUL = frozenset({SUM, AVG})
SUM_ONLY = frozenset({SUM})


def plan(
    *,
    factor: float | None = None,
    shards: int = 2,
    replicas: int = 1,
    overflow_risk: bool = False,
    force_sum: bool = False,
    supported: frozenset[ReduceOp] = ALL,
) -> DividePlan:
    return divide_plan(
        DivideRequest(
            factor=factor,
            shard_world_size=shards,
            replicate_world_size=replicas,
            overflow_risk=overflow_risk,
            force_sum=force_sum,
            supported=supported,
        )
    )


# Without overflow risk, on a group that has everything.


@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (8, 1), (2, 4), (1, 4)])
def test_the_default_is_an_average(shards: int, replicas: int) -> None:
    assert plan(shards=shards, replicas=replicas) == DividePlan(None, AVG, AVG, None)


def test_one_rank_sums() -> None:
    assert plan(shards=1) == DividePlan(None, SUM, SUM, None)


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_shard_world_size_as_factor_is_an_average_over_the_shards(replicas: int) -> None:
    assert plan(factor=2.0, shards=2, replicas=replicas) == DividePlan(None, AVG, SUM, None)


@pytest.mark.parametrize("factor", [1.0, 3.0, 300.0, 0.5])
@pytest.mark.parametrize("replicas", [1, 4])
def test_any_other_factor_is_a_premultiplied_sum(factor: float, replicas: int) -> None:
    assert plan(factor=factor, replicas=replicas) == DividePlan(None, PREMUL, SUM, None, premul=1 / factor)


@pytest.mark.parametrize(("factor", "post"), [(None, 8.0), (3.0, 3.0), (2.0, 2.0), (1.0, 1.0)])
def test_forced_sums_divide_afterwards(factor: float | None, post: float) -> None:
    assert plan(factor=factor, shards=2, replicas=4, force_sum=True) == DividePlan(None, SUM, SUM, post)


@pytest.mark.parametrize(
    ("factor", "shards", "replicas", "pre", "post"),
    [
        (None, 1, 1, 1.0, 1.0),
        (None, 2, 1, 2.0, 1.0),
        (None, 4, 1, 2.0, 2.0),
        (None, 4, 2, 4.0, 2.0),
        (None, 8, 8, 8.0, 8.0),
        (None, 3, 1, 2.0, 1.5),
        (None, 6, 1, 4.0, 1.5),
        (None, 12, 1, 4.0, 3.0),
        (16.0, 2, 1, 4.0, 4.0),
        (1.0, 2, 1, 1.0, 1.0),
        (0.5, 2, 1, 1.0, 0.5),
    ],
)
@pytest.mark.parametrize("force_sum", [False, True])
def test_with_overflow_risk_the_division_is_split(
    factor: float | None, shards: int, replicas: int, pre: float, post: float, force_sum: bool
) -> None:
    made = plan(factor=factor, shards=shards, replicas=replicas, overflow_risk=True, force_sum=force_sum)
    assert made == DividePlan(pre, SUM, SUM, post)


# Where native FSDP2 has no answer


@pytest.mark.parametrize("replicas", [1, 4])
def test_without_premultiplied_sums_a_factor_divides_afterwards(replicas: int) -> None:
    # Native raises on gloo and on other libraries without PREMUL_SUM: ByteDance-Seed/VeOmni#241.
    assert plan(factor=3.0, replicas=replicas, supported=NO_PREMUL) == DividePlan(None, SUM, SUM, None, owed=3.0)


def test_without_averages_the_default_divides_afterwards() -> None:
    assert plan(shards=2, replicas=4, supported=SUM_ONLY) == DividePlan(None, SUM, SUM, None, owed=8.0)
    assert plan(factor=2.0, supported=SUM_ONLY) == DividePlan(None, SUM, SUM, None, owed=2.0)
    assert plan(factor=2.0, supported=frozenset({SUM, PREMUL})) == DividePlan(None, PREMUL, SUM, None, premul=0.5)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_without_other_shards_a_factor_divides_once_in_front_of_the_all_reduce(factor: float, replicas: int) -> None:
    # RED-06; native (torch 2.13) divides twice there.
    assert plan(factor=factor, shards=1, replicas=replicas) == DividePlan(factor, SUM, SUM, None)


# What every plan keeps


def result(made: DividePlan, *, shards: int, replicas: int) -> float:
    """What becomes of a gradient of 1 on every rank."""
    value = 1.0 / (made.pre or 1.0)
    value *= {SUM: shards, AVG: 1, PREMUL: shards * (made.premul or 0)}[made.scatter_op] if shards > 1 else 1
    value *= {SUM: replicas, AVG: 1}[made.all_reduce_op] if replicas > 1 else 1
    return value / (made.owed or 1.0) / (made.post or 1.0)


REQUESTS = {
    "factor": st.none() | st.floats(2.0**-20, 2.0**20),
    "shards": st.integers(1, 1024),
    "replicas": st.integers(1, 64),
    "overflow_risk": st.booleans(),
    "force_sum": st.booleans(),
    "supported": st.sampled_from([ALL, NO_PREMUL, SUM_ONLY, frozenset({SUM, PREMUL})]),
}


@given(**REQUESTS)
def test_the_whole_path_divides_the_sum_once(
    factor: float | None,
    shards: int,
    replicas: int,
    overflow_risk: bool,
    force_sum: bool,
    supported: frozenset[ReduceOp],
) -> None:
    made = plan(
        factor=factor,
        shards=shards,
        replicas=replicas,
        overflow_risk=overflow_risk,
        force_sum=force_sum,
        supported=supported,
    )
    num_ranks = shards * replicas
    assert result(made, shards=shards, replicas=replicas) == pytest.approx(num_ranks / (factor or num_ranks), rel=1e-12)
    assert {made.scatter_op, made.all_reduce_op} <= supported
    assert (made.premul is not None) == (made.scatter_op is PREMUL)
    assert made.all_reduce_op is not PREMUL, "the second collective must not scale again"


@given(st.integers(0, 20), st.integers(0, 10))
def test_a_split_division_is_even_for_powers_of_two(log_shards: int, log_replicas: int) -> None:
    made = plan(shards=2**log_shards, replicas=2**log_replicas, overflow_risk=True)
    assert made.pre is not None
    assert made.post is not None
    assert made.pre / made.post in (1.0, 2.0), "neither the partial sums nor the summands leave the range"
