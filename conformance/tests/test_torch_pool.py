"""Pools of torch workers: groups over gloo that outlive a job, and jobs that leave something undone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpcompat_conformance.context import current
from hpcompat_conformance.failures import JobFailed, RanksDiverged
from hpcompat_conformance.on_torch import collectives
from hpcompat_conformance.pool import PoolSet


def job_sum(value: float) -> float:
    tensor = torch.tensor(value + current().rank)
    dist.all_reduce(tensor)
    return tensor.item()


def job_raise_before_a_collective() -> None:
    if current().rank == 1:
        raise LookupError("rank 1 did not come")
    job_sum(0.0)


def job_leave_a_collective_half_done() -> None:
    if current().rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def job_group_names() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    again = dist.new_group([0, 1])
    for group in (mesh.get_group("outer"), mesh.get_group("inner")):
        dist.all_reduce(torch.ones(1), group=group)
    if current().rank > 1:
        return [group.group_name for group in mesh.get_all_groups()]
    dist.all_reduce(torch.ones(1), group=again)
    return [group.group_name for group in (*mesh.get_all_groups(), again)]


def job_dtensor_norm() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    return torch.linalg.vector_norm(tensor).full_tensor().item()


def job_disturb() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


def job_look() -> tuple[bool, str, int]:
    return torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.get_num_threads()


def job_record() -> list[tuple[str, tuple[int, ...], int, str]]:
    ones, four = torch.ones(4), torch.ones(8, dtype=torch.bfloat16)
    before = dist.all_reduce
    with collectives.record() as log:
        dist.all_gather_into_tensor(torch.empty(8), ones)  # calls all_gather_single where that exists
        dist.reduce_scatter_tensor(output=torch.empty(4, dtype=torch.bfloat16), input=four)
        dist.all_reduce(ones, group=dist.group.WORLD)
        dist.all_gather([torch.empty(4), torch.empty(4)], ones)
    assert dist.all_reduce is before
    dist.all_reduce(ones)
    return [(event.kind, event.ranks, event.num_elements, event.dtype) for event in log]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_collective_on_every_size(pool: PoolSet, world_size: int) -> None:
    total = 3.0 * world_size + sum(range(world_size))
    assert pool(world_size).run(job_sum, value=3.0) == [total] * world_size


def test_an_exception_frees_the_ranks_that_wait_in_a_collective(pool: PoolSet) -> None:
    with pytest.raises(JobFailed, match="rank 1 did not come") as caught:
        pool(2).run(job_raise_before_a_collective, deadline=600)
    assert "rank 0 was still running" in str(caught.value)
    assert "in job_sum" in str(caught.value)
    assert pool(2).run(job_sum, value=0.0) == [1.0, 1.0]


def test_a_collective_that_not_all_ranks_issued(pool: PoolSet) -> None:
    with pytest.raises(RanksDiverged, match="collectives issued on group 'world'"):
        pool(2).run(job_leave_a_collective_half_done)
    assert pool(2).run(job_sum, value=0.0) == [1.0, 1.0]


def test_groups_are_reused_between_jobs_and_not_within_one(pool: PoolSet) -> None:
    first = pool(4).run(job_group_names)
    assert pool(4).run(job_group_names) == first
    assert [len(set(names)) for names in first] == [3, 3, 2, 2]


def test_dtensor_operators_work_in_a_second_job_on_an_equal_mesh(pool: PoolSet) -> None:
    norm = torch.linalg.vector_norm(torch.arange(8.0)).item()
    for _ in range(2):
        assert pool(4).run(job_dtensor_norm) == [pytest.approx(norm)] * 4


def test_a_job_finds_the_defaults_of_torch(pool: PoolSet) -> None:
    pool(1).run(job_disturb)
    assert pool(1).run(job_look) == [(True, "torch.float32", 1)]


def test_collectives_are_recorded_once_each(pool: PoolSet) -> None:
    expected = [
        ("all_gather", (0, 1), 8, "float32"),
        ("reduce_scatter", (0, 1), 8, "bfloat16"),
        ("all_reduce", (0, 1), 4, "float32"),
        ("all_gather", (0, 1), 8, "float32"),
    ]
    assert pool(2).run(job_record) == [expected, expected]
