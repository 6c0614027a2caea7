"""Where native FSDP2 (torch 2.13) itself raises, with the reason."""

from __future__ import annotations

from parity.combos import Combo

NATIVE_GAPS: dict[str, str] = {}
"""Id of a combination of the matrix to the reason why native cannot run it. Native runs all of them."""

NATIVE_REFUSES: list[tuple[Combo, str]] = [
    (Combo("mlp", 2, options=("factor=3",)), "PREMUL_SUM"),
    (Combo("mlp", 4, "hsdp", options=("factor=300",)), "PREMUL_SUM"),
    (Combo("late", 2, policy="bf16", accumulation=4), "uniform gradient dtype"),
    (Combo("mixed-dtypes", 2), "uniform original parameter dtype"),
    (Combo("rootless", 2, options=("share-context",)), "IndexError"),
]
"""Combinations outside the matrix, with a part of native's error: compared with a single-process run instead.

An integer reshard of `Shard(1)` parameters is one more, but there only some of native's ranks raise; the others hang.
"""
