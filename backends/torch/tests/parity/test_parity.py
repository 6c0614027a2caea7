"""AdamW steps with hpcompat and with native FSDP2 from one seed: the same bits everywhere.

By default in as many combinations as it takes for any three choices of settings to meet (`covering`). Compared on every
rank after every step: losses of all microbatches, gradients, parameters, both AdamW moments, buffers, and once the
layout (type, dtype, shape, placements, mesh) of every parameter.
"""

from __future__ import annotations

import pytest

from covering import covering, left_out
from parity.checks import check_same_bits, failures
from parity.combos import EXTRAS, Combo, choices, identity, matrix
from parity.models import MODELS
from parity.native_gaps import NATIVE_GAPS
from parity.running import Compare

MATRIX = list(matrix(tuple(MODELS)))
IN_MATRIX, IN_EXTRAS = ([combo for combo in found if combo.id not in NATIVE_GAPS] for found in (MATRIX, EXTRAS))
MATRIX_RUNS = covering(IN_MATRIX, choices, strength=3, id=identity)


@pytest.mark.parametrize("combo", MATRIX_RUNS)
def test_same_bits(compare: Compare, combo: Combo) -> None:
    check_same_bits(combo, compare(combo))


@pytest.mark.parametrize("combo", covering(IN_EXTRAS, choices, strength=2, id=identity))
def test_same_bits_with_settings(compare: Compare, combo: Combo) -> None:
    check_same_bits(combo, compare(combo))


@pytest.mark.parametrize("model", MODELS)
def test_same_bits_after_many_steps(compare: Compare, model: str) -> None:
    """The steps after the fourth are like it: nothing that the first few set up is still new."""
    combo = Combo(model, 2, policy="bf16", num_steps=20)
    check_same_bits(combo, compare(combo))


@pytest.mark.parametrize("model", MODELS)
def test_native_is_deterministic(compare: Compare, model: str) -> None:
    """The precondition of all the rest: two native runs from one seed are the same to the last bit."""
    results = compare(Combo(model, 2, policy="bf16", accumulation=4), ours="native")
    assert not failures(results), failures(results)


def test_every_three_settings_meet_by_default() -> None:
    assert len(MATRIX_RUNS) == len(IN_MATRIX)
    assert not left_out(MATRIX_RUNS, choices, strength=3, marks=["exhaustive"])


def test_gaps_name_combinations_that_exist() -> None:
    known = {combo.id for combo in [*MATRIX, *EXTRAS]}
    assert set(NATIVE_GAPS) <= known
