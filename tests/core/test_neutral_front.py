"""The neutral calls without any framework: what they refuse, and how numbers travel."""

from __future__ import annotations

from typing import Any

import pytest

import hpcompat
from hpcompat import distributed, registry


class Loopback:
    """A backend of which only the exchange of bytes is there: every rank sent what this one sends, or what is set."""

    name = "loopback"

    def __init__(self) -> None:
        self.distributed = self
        self.others: list[float] = []

    def gather_bytes(self, data: bytes, group: Any) -> list[bytes]:
        return [data, *map(distributed._pack, self.others)]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    loopback = Loopback()
    monkeypatch.setattr(registry, "get_backend", lambda name=None: loopback)
    return loopback


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 2**53 + 3), ("max", 2**53 + 1), ("min", -5), ("avg", (2**53 + 3) / 3)]
)
def test_ints_are_reduced_exactly(backend: Loopback, op: str, expected: float) -> None:
    backend.others = [7, -5]
    result = hpcompat.all_reduce_scalar(2**53 + 1, op=op)
    assert result == expected
    assert isinstance(result, float if op == "avg" else int)


def test_floats_are_added_in_the_order_of_the_ranks(backend: Loopback) -> None:
    backend.others = [1e16, -1e16]
    assert hpcompat.all_reduce_scalar(1.0) == 1.0 + 1e16 - 1e16 != 1.0


@pytest.mark.parametrize("value", [-0.0, float("inf"), 5e-324, 2**63 - 1, -(2**63), True])
def test_numbers_travel_without_loss(value: float) -> None:
    packed = distributed._pack(value)
    assert len(packed) == 9
    assert repr(distributed._unpack(packed)) == repr(value + 0 if value is True else value)


@pytest.mark.parametrize(
    ("value", "op", "error", "message"),
    [
        (1, "product", ValueError, r"expected op to be one of \('sum', 'avg', 'max', 'min'\), but got 'product'"),
        ("1", "sum", TypeError, r"expected a Python number, but got a str; pass value.item\(\)"),
        (2**63, "sum", ValueError, r"expected an int within 64 bits, but got 9223372036854775808; pass a float"),
    ],
)
def test_wrong_scalars_are_refused(
    backend: Loopback, value: Any, op: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hpcompat.all_reduce_scalar(value, op=op)


def test_value_and_grad_wants_weights_and_a_function() -> None:
    with pytest.raises(ValueError, match=r"expected weights to differentiate by, but got none; pass list\("):
        hpcompat.value_and_grad(print, [])
    with pytest.raises(TypeError, match="expected fn to be callable, but got 5"):
        hpcompat.value_and_grad(5, [object()])  # type: ignore[arg-type]


def test_mesh_wants_a_name_per_axis() -> None:
    with pytest.raises(ValueError, match=r"expected a name for each of the 2 axes of the mesh, but got \('dp',\)"):
        hpcompat.init_device_mesh("cpu", (2, 2), mesh_dim_names=["dp"])


def test_what_init_started_is_what_later_calls_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(registry, "_instance", lambda name: asked.append(name))
    monkeypatch.setattr(registry, "_only_candidate", lambda: "the only one")
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.delenv(registry.ENV_VAR, raising=False)
    registry.get_backend()
    monkeypatch.setenv(registry.ENV_VAR, "mindspore")
    registry.get_backend()
    registry.make_default("torch")
    registry.get_backend()
    registry.get_backend("ms")
    registry.make_default(None)
    registry.get_backend()
    assert asked == ["the only one", "mindspore", "torch", "mindspore", "mindspore"]
