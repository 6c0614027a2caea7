"""Marks stay with the object that they were put on."""

from __future__ import annotations

import copy
import pickle

from hpcompat.core.identity import mark, mark_of


class Thing:
    """What a framework copies with all its attributes."""


def test_copies_do_not_take_marks_over() -> None:
    thing = Thing()
    assert mark_of(thing, "_seen") is None
    mark(thing, "_seen", 1)
    mark(thing, "_seen", 2)
    assert mark_of(thing, "_seen") == 2
    for other in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert hasattr(other, "_seen")
        assert mark_of(other, "_seen") is None
        mark(other, "_seen", 3)
        assert mark_of(other, "_seen") == 3
    assert mark_of(thing, "_seen") == 2
