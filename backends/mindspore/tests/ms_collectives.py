"""What the ranks run to check collectives and meshes."""

from __future__ import annotations

import json
from typing import Any

import mindspore
import numpy as np
import pytest

from gloo_bits import DTYPES, PATH, SIZES, values
from hpcompat.comm import ReduceOp
from hpcompat_mindspore.job import group_of, groups, world
from hpcompat_mindspore.mesh import DeviceMesh, init_device_mesh
from hpcompat_mindspore.tensors import numpy_dtype


def same_bits_as_gloo() -> None:
    group = world()
    expected = json.loads(PATH.read_text())[str(group.size())]
    for size in SIZES:
        for name in DTYPES:
            dtype = numpy_dtype(getattr(mindspore, name))
            scattered = np.empty(size, dtype)
            group.reduce_scatter(
                scattered, values(group.rank(), size * group.size()).astype(dtype), ReduceOp.AVG
            ).wait()
            reduced = values(group.rank(), size).astype(dtype)
            group.all_reduce(reduced, ReduceOp.SUM).wait()
            for kind, array in (("reduce_scatter", scattered), ("all_reduce", reduced)):
                bits = array.view(np.int32 if name == "float32" else np.int16).tolist()
                assert bits == expected[f"{kind} {name} {size}"][group.rank()], (kind, name, size)


def gathers() -> None:
    group = world()
    size, rank = group.size(), group.rank()
    for name in ("float32", "bfloat16", "float16", "int64", "bool", "uint8"):
        dtype = numpy_dtype(getattr(mindspore, name if name != "bool" else "bool_"))
        output = np.zeros(3 * size, dtype)
        group.all_gather(output, np.full(3, rank % 2, dtype)).wait()
        np.testing.assert_array_equal(output.astype(np.float32), np.repeat(np.arange(size) % 2, 3).astype(np.float32))
    in_place = np.full(2 * size, -1.0, np.float32)
    slot = in_place[2 * rank : 2 * rank + 2]
    slot[:] = rank
    group.all_gather(in_place, slot).wait()
    assert in_place.tolist() == [float(member) for member in range(size) for _ in range(2)]


def many_in_flight() -> None:
    """Several collectives of several kinds are issued before the first is waited for, and waited for in disorder."""
    group = world()
    size, rank = group.size(), group.rank()
    gathered = [np.zeros(4 * size, np.float32) for _ in range(3)]
    works: list[Any] = [group.all_gather(out, np.full(4, rank + 10 * i, np.float32)) for i, out in enumerate(gathered)]
    scattered = np.zeros(4, np.float32)
    works.append(group.reduce_scatter(scattered, np.arange(4 * size, dtype=np.float32), ReduceOp.SUM))
    for work in reversed(works):
        work.wait()
        work.wait()
    for i, out in enumerate(gathered):
        assert out.tolist() == [float(member + 10 * i) for member in range(size) for _ in range(4)]
    assert scattered.tolist() == [float(size * (4 * rank + i)) for i in range(4)]


def meshes() -> None:
    """On 4 ranks, as 2 x 2."""
    rank = world().rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(1)) == (2, (2, 2), 4, 2)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_coordinate() == [rank // 2, rank % 2]
    assert (mesh.get_local_rank("replicate"), mesh.get_local_rank(1)) == (rank // 2, rank % 2)
    assert mesh.get_group("shard").ranks == ((0, 1), (2, 3))[rank // 2]
    assert mesh.get_group("replicate").ranks == ((0, 2), (1, 3))[rank % 2]
    assert mesh["shard"].mesh.tolist() == [[0, 1], [2, 3]][rank // 2]
    assert mesh["shard"].get_group() is mesh.get_group("shard")
    assert mesh["replicate", "shard"] is mesh
    swapped = mesh["shard", "replicate"]
    assert swapped.mesh.tolist() == [[0, 2], [1, 3]]
    assert swapped.get_coordinate() == [rank % 2, rank // 2]
    flat = mesh._flatten("dp")
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert mesh["dp"] is flat
    assert flat.get_group() is world()
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "cp", "dp"))
    assert cube["dp", "cp"].mesh.tolist() == [[2 * (rank // 2)], [2 * (rank // 2) + 1]]
    assert cube["dp", "cp"]._flatten("both").size() == 2
    _refusals(mesh)


def _refusals(mesh: DeviceMesh) -> None:
    for wrong, kind in (
        (lambda: mesh["tp"], KeyError),
        (lambda: mesh.get_group("tp"), KeyError),
        (lambda: mesh.get_group(), RuntimeError),
        (lambda: init_device_mesh("cpu", (3,)), ValueError),
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")), ValueError),
        (lambda: DeviceMesh("cpu", [0, 0]), ValueError),
        (lambda: DeviceMesh("cpu", [0, 7]), ValueError),
    ):
        with pytest.raises(kind):
            wrong()


def some_ranks_make_a_group() -> None:
    """Only the members take part in making a group: the others may be elsewhere, as pipeline stages are."""
    if world().rank() < 2:
        group = group_of((0, 1))
        output = np.zeros(2, np.float32)
        group.all_gather(output, np.full(1, world().rank(), np.float32)).wait()
        assert output.tolist() == [0.0, 1.0]
        assert group_of((0, 1)) is group
    assert groups()[0] is world()


def rank_outside_a_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if world().rank() < 2:
        assert mesh.get_coordinate() == [world().rank()]
        return
    assert mesh.get_coordinate() is None
    with pytest.raises(RuntimeError):
        mesh.get_group()
