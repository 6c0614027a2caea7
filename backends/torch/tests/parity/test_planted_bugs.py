"""Negative controls: bugs planted in hpcompat must show up in the comparison that is meant to see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpcompat_conformance.pool import PoolSet
from parity.bits import bits
from parity.combos import Combo
from parity.compare import Difference, first_difference
from parity.plants import PLANTS
from parity.running import Compare
from parity.training import Trace

NUMERIC = {
    "no-post-divide": (Combo("mlp", 4, policy="fp16"), 0, "gradient"),
    "lost-last-rank": (Combo("mlp", 2), 0, "loss"),
    "kept-accumulation": (Combo("mlp", 2, policy="bf16", accumulation=4), 1, "gradient"),
    "dropped-microbatch": (Combo("mlp", 2, accumulation=4), 0, "gradient"),
    "wrong-all-reduce-group": (Combo("mlp", 4, "hsdp"), 0, "gradient"),
    "no-all-reduce": (Combo("mlp", 2, "hsdp"), 0, "gradient"),
    "one-ulp": (Combo("mlp", 2), 1, "gradient"),
    "uncast-reduction": (Combo("mlp", 2, policy="bf16"), 0, "gradient"),
}
"""Bug to the combination that meets it, the step in which it first shows, and in what."""

TRAFFIC = {
    "wrong-prefetch": Combo("decoder", 2),
    "no-gather-for-backward": Combo("decoder", 2),
    "no-all-reduce": Combo("decoder", 4, "hsdp"),
    "wrong-all-reduce-group": Combo("decoder", 4, "hsdp"),
    "uncast-reduction": Combo("decoder", 2, policy="bf16"),
}
"""Bug to the combination in which the list of collectives shows it. The first two leave every number right."""


@pytest.mark.parametrize("plant", NUMERIC)
def test_bits_show_it(compare: Compare, plant: str) -> None:
    combo, step, kind = NUMERIC[plant]
    results = compare(combo, plant=plant)
    assert not any(result["ours_error"] or result["theirs_error"] for result in results), results
    found = [result["difference"] for result in results if result["difference"]]
    assert found, "the planted bug changed no bit"
    assert min((difference["step"], difference["kind"]) for difference in found) == (step, kind), found


@pytest.mark.parametrize("plant", TRAFFIC)
def test_collectives_show_it(pool: PoolSet, plant: str) -> None:
    combo = TRAFFIC[plant]
    target = "parity.collectives:collectives"
    for ours, theirs in pool(combo.world).run(target, combo=combo.to_dict(), phase="training", plant=plant):
        assert ours != theirs


@pytest.mark.parametrize("plant", ["wrong-prefetch", "no-gather-for-backward"])
def test_bits_alone_would_not_show_traffic(compare: Compare, plant: str) -> None:
    """Why the collectives are compared too."""
    assert all(result["difference"] is None for result in compare(Combo("mlp", 2), plant=plant))


def test_every_plant_is_used() -> None:
    assert set(PLANTS) == set(NUMERIC) | set(TRAFFIC)


def one_entry(value: torch.Tensor | None, kind: str = "gradient", fqn: str = "weight") -> Trace:
    trace = Trace(layouts={"weight": "Tensor"})
    trace.add(3, kind, fqn, value)
    return trace


def flipped(value: torch.Tensor) -> torch.Tensor:
    """The lowest bit of element 1 flipped."""
    other = value.clone()
    bits(other)[1] ^= 1
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_one_bit_is_found_where_it_is(dtype: torch.dtype) -> None:
    value = torch.tensor([1, 2, 3]).to(dtype)
    assert first_difference(one_entry(value), one_entry(value.clone())) is None
    difference = first_difference(one_entry(flipped(value)), one_entry(value))
    assert difference is not None
    assert (difference.step, difference.kind, difference.fqn, difference.index) == (3, "gradient", "weight", 1)
    assert difference.ours != difference.theirs


def test_nans_and_zeros_compare_by_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert first_difference(one_entry(nan), one_entry(nan.clone())) is None
    assert first_difference(one_entry(torch.tensor([0.0, 1.0])), one_entry(torch.tensor([-0.0, 1.0]))) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda value: None,
        lambda value: value.double(),
        lambda value: value.reshape(3, 1),
        lambda value: value[:2],
    ],
    ids=["missing", "dtype", "shape", "length"],
)
def test_structure_counts(change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    value = torch.tensor([1.0, 2.0, 3.0])
    difference = first_difference(one_entry(change(value)), one_entry(value))
    assert isinstance(difference, Difference)
    assert difference.index is None


def test_order_layout_and_length_count() -> None:
    value = torch.tensor([1.0])
    assert first_difference(one_entry(value, fqn="bias"), one_entry(value)) is not None
    assert first_difference(one_entry(value, kind="parameter"), one_entry(value)) is not None
    moved = one_entry(value)
    moved.layouts["weight"] = "DTensor"
    assert first_difference(moved, one_entry(value)).kind == "layout"  # type: ignore[union-attr]
    longer = one_entry(value)
    longer.add(4, "gradient", "weight", value)
    assert first_difference(longer, one_entry(value)).kind == "length"  # type: ignore[union-attr]
