"""Ten AdamW steps with hpcompat and with native FSDP2 from one seed: the same bits everywhere, in every combination.

Compared on every rank after every step: losses of all microbatches, gradients, parameters, both AdamW moments, buffers,
and once the layout (type, dtype, shape, placements, mesh) of every parameter.
"""

from __future__ import annotations

import pytest

from parity.checks import check_substance, failures
from parity.combos import EXTRAS, Combo, identity, matrix
from parity.models import MODELS
from parity.native_gaps import NATIVE_GAPS
from parity.running import Compare

MATRIX = list(matrix(tuple(MODELS)))


@pytest.mark.parametrize("combo", [c for c in MATRIX if c.id not in NATIVE_GAPS], ids=identity)
def test_same_bits(compare: Compare, combo: Combo) -> None:
    results = compare(combo)
    assert not failures(results), failures(results)
    check_substance(combo, results)


@pytest.mark.parametrize("combo", [c for c in EXTRAS if c.id not in NATIVE_GAPS], ids=identity)
def test_same_bits_with_settings(compare: Compare, combo: Combo) -> None:
    results = compare(combo)
    assert not failures(results), failures(results)
    check_substance(combo, results)


@pytest.mark.parametrize("model", MODELS)
def test_native_is_deterministic(compare: Compare, model: str) -> None:
    """The precondition of all the rest: two native runs from one seed are the same to the last bit."""
    results = compare(Combo(model, 2, policy="bf16", accumulation=4), ours="native")
    assert not failures(results), failures(results)


def test_gaps_name_combinations_that_exist() -> None:
    known = {combo.id for combo in [*MATRIX, *EXTRAS]}
    assert set(NATIVE_GAPS) <= known
