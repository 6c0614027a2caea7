"""By which reduction a version of torch is trusted, and what is done where nothing is known."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from hpcompat import ReduceOp
from hpcompat_torch import transport
from hpcompat_torch.transport import AVERAGES, SUMS, known


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the measurement, and is its result."""
    found: dict[str, Any] = {"all_reduce": AVERAGES, "reduce_scatter": SUMS}
    monkeypatch.setattr(transport, "measured_on_gloo", lambda: found)
    return found


@pytest.mark.parametrize(
    ("version", "all_reduce", "reduce_scatter"),
    [
        ("2.7.1+cu126", SUMS, SUMS),
        ("2.8.0+cu128", AVERAGES, SUMS),
        ("2.9.0a0+git1", AVERAGES, SUMS),
        ("2.9.0", AVERAGES, AVERAGES),
        ("2.10.0", AVERAGES, AVERAGES),
        ("2.14.1+cu130", AVERAGES, AVERAGES),
        # Newer than the table: as measured.
        ("2.15.0.dev20270101", AVERAGES, SUMS),
        ("2.15.0a0+git1", AVERAGES, SUMS),
        ("3.0.0", AVERAGES, SUMS),
    ],
)
def test_gloo_by_version(version: str, all_reduce: Any, reduce_scatter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert known("gloo", collective="all_reduce", device_type="cpu") == all_reduce
    assert known("gloo", collective="reduce_scatter", device_type="cpu") == reduce_scatter


def test_an_unknown_transport_adds_up() -> None:
    for name, device_type in (("gloo", "cuda"), ("hccl", "npu"), ("mpi", "cpu"), ("undefined", "cpu")):
        assert known(name, collective="reduce_scatter", device_type=device_type) == SUMS
    assert known("nccl", collective="reduce_scatter", device_type="cuda") == frozenset(ReduceOp)


def test_without_a_measurement_there_are_sums(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no interface")

    monkeypatch.undo()
    monkeypatch.setattr(dist, "ProcessGroupGloo", refuse)
    with caplog.at_level(logging.WARNING, logger="hpcompat"):
        assert transport.measured_on_gloo.__wrapped__() == {"all_reduce": SUMS, "reduce_scatter": SUMS}
    assert "no interface" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_the_transport_of_a_group_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the group was made with: a name, a name for each device, nothing."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for asked in (None, "gloo", "cpu:gloo"):
        assert transport.transport_of(dist.new_group([0], backend=asked), cpu) == "gloo"
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert [transport.transport_of(None, device) for device in (cpu, cuda)] == ["gloo", "nccl"]
