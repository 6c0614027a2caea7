"""Rank side: train twice from one seed, with two implementations, and find the first bit that differs."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from parity.bits import bits
from parity.combos import Combo
from parity.plants import planted
from parity.training import Entry, Trace, train


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ; `ours` and `theirs` are the two values there, as text."""

    step: int
    kind: str
    fqn: str
    index: int | None
    ours: str
    theirs: str


def show(value: Tensor) -> str:
    """A scalar with its bits."""
    width = 2 * value.element_size()
    return f"{value.item()!r} (0x{bits(value).item() & (1 << 4 * width) - 1:0{width}x})"


def describe(value: Tensor | None) -> str:
    return "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"


def entry_difference(ours: Entry, theirs: Entry) -> Difference | None:
    """Compare one recorded tensor."""
    place = (theirs.step, theirs.kind, theirs.fqn)
    if (ours.step, ours.kind, ours.fqn) != place:
        return Difference(
            *place, None, f"recorded {ours.step} {ours.kind} {ours.fqn}", "recorded " + " ".join(map(str, place))
        )
    if describe(ours.value) != describe(theirs.value):
        return Difference(*place, None, describe(ours.value), describe(theirs.value))
    if ours.value is None or theirs.value is None or ours.value.numel() == 0:
        return None
    mine, other = bits(ours.value), bits(theirs.value)
    if torch.equal(mine, other):
        return None
    index = int((mine != other).nonzero()[0])
    return Difference(*place, index, show(ours.value.reshape(-1)[index]), show(theirs.value.reshape(-1)[index]))


def first_difference(ours: Trace, theirs: Trace) -> Difference | None:
    """The first difference in layout, then in time; None if the two runs are the same to the last bit."""
    for fqn in {**theirs.layouts, **ours.layouts}:
        mine, other = ours.layouts.get(fqn, "missing"), theirs.layouts.get(fqn, "missing")
        if mine != other:
            return Difference(-1, "layout", fqn, None, mine, other)
    for mine, other in zip(ours.entries, theirs.entries, strict=False):
        difference = entry_difference(mine, other)
        if difference is not None:
            return difference
    if len(ours.entries) != len(theirs.entries):
        return Difference(-1, "length", "", None, str(len(ours.entries)), str(len(theirs.entries)))
    return None


def counts(trace: Trace) -> dict[str, int]:
    """Elements per kind, as a proof that something was compared."""
    totals: Counter[str] = Counter()
    for entry in trace.entries:
        totals[entry.kind] += 0 if entry.value is None else entry.value.numel()
    return dict(totals)


def attempt(run: Callable[[], Trace]) -> tuple[Trace | None, str | None]:
    """The trace, or the error's type and text with the place it came from."""
    try:
        return run(), None
    except Exception as error:  # the whole point: an implementation may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} [{last.filename}:{last.lineno} {last.name}]"


def compare(
    combo: dict[str, Any],
    ours: str = "hpcompat",
    theirs: str = "native",
    plant: str | None = None,
) -> dict[str, Any]:
    """Train `combo` with both implementations, one after the other, and report what differs on this rank.

    `plant` names a bug of `parity.plants` that is active while `ours` runs.
    Returns `{"difference", "counts", "losses", "ours_error", "theirs_error"}`.
    """
    cell = Combo.from_dict(combo)
    reference, theirs_error = attempt(lambda: train(cell, theirs))
    with planted(plant):
        subject, ours_error = attempt(lambda: train(cell, ours))
    difference = None if subject is None or reference is None else first_difference(subject, reference)
    return {
        "difference": None if difference is None else asdict(difference),
        "counts": {} if subject is None else counts(subject),
        "losses": [] if reference is None else [float(e.value) for e in reference.entries if e.kind == "loss"],
        "ours_error": ours_error,
        "theirs_error": theirs_error,
    }
