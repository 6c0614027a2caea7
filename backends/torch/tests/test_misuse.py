"""Every misuse in `misuse.table` raises the documented error, and one that native FSDP2's users catch already."""

from __future__ import annotations

import inspect
import re

import pytest

from hpcompat import HSDPModule
from hpcompat_conformance.pool import PoolSet
from misuse import settings
from misuse.row import Misuse, Raised, attempt, qualified
from misuse.table import BY_ID, ROWS

OURS = "hpcompat"
NATIVE = "torch.distributed.fsdp"
NATIVE_ROWS = [row for row in ROWS if row.native is not None]

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:.*reshard_after_forward:UserWarning"),
]


def raised_by(row: Misuse, *, api: str, pool: PoolSet) -> list[Raised | None]:
    """By rank."""
    if row.world_size == 1:
        return [attempt(row.provoke, api=api)]
    return pool(row.world_size).run("misuse.remote:provoke", row=row.id, api=api)


def faults(row: Misuse, raised: Raised | None) -> list[str]:
    """What is wrong with the error; nothing if it is as documented."""
    if raised is None:
        return ["nothing was raised"]
    wrong_types = [f"no {qualified(kind)}" for kind in row.types if not raised.is_a(kind)]
    patterns = (row.message, row.advice, "but got")
    return wrong_types + [f"no {text!r}" for text in patterns if not re.search(text, raised.message, re.DOTALL)]


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_raises_the_documented_error(row: Misuse, pool: PoolSet) -> None:
    by_rank = raised_by(row, api=OURS, pool=pool)
    assert [faults(row, raised) for raised in by_rank] == [[]] * row.world_size, by_rank


@pytest.mark.parametrize("row", NATIVE_ROWS, ids=[row.id for row in NATIVE_ROWS])
def test_native_raises_a_class_that_ours_is_too(row: Misuse, pool: PoolSet) -> None:
    assert row.native in row.types
    by_rank = raised_by(row, api=NATIVE, pool=pool)
    assert [raised is not None and raised.is_a(row.native) for raised in by_rank] == [True] * row.world_size, by_rank


# Where native fails by accident, in Python's words or those of an operator, or by a limit that is not its own.
ACCIDENTS = {
    "fully-shard-over-replicate",
    "dims-axis-as-a-number",
    "gradient-sparse",
    "ignored-params-string",
    "offload-pinned-without-accelerator",
    "placement-fn-not-callable",
    "set_modules_to_backward_prefetch-none",
    "set_modules_to_backward_prefetch-one-module",
    "set_modules_to_forward_prefetch-none",
    "set_modules_to_forward_prefetch-one-module",
    "shard-dim-too-small",
    "symmetric-memory-on-gloo",
    # Says fully_shard where replicate was called; from "doesn't support scalar parameters" on ours is the same.
    "replicate-scalar",
}
# Ours knows the type of the module by another path, and a parameter before the root has given it its full name.
NAMES = re.compile(r"<class '[\w.]+'>|'[\w.]+'")
NUM_WORDS = 4


@pytest.mark.parametrize("row", [row for row in NATIVE_ROWS if row.id not in ACCIDENTS], ids=lambda row: row.id)
def test_begins_with_the_words_of_native(row: Misuse, pool: PoolSet) -> None:
    """People match on them."""
    ours, native = (raised_by(row, api=api, pool=pool)[0] for api in (OURS, NATIVE))
    assert ours is not None
    assert native is not None
    begins = [re.split(r"[\s,.:;]+", NAMES.sub("", raised.message).strip())[:NUM_WORDS] for raised in (ours, native)]
    assert begins[1] in (begins[0], [""]), (ours.message, native.message)


def test_accidents_of_native_are_rows() -> None:
    assert {row.id for row in NATIVE_ROWS} >= ACCIDENTS


def test_rows_are_told_apart() -> None:
    assert len(BY_ID) == len(ROWS)
    assert len(ROWS) >= 40


def test_every_switch_has_a_row() -> None:
    switches = {
        name: next(iter(parameters))
        for name, method in inspect.getmembers(HSDPModule, inspect.isfunction)
        if not name.startswith("_")
        and (parameters := dict(list(inspect.signature(method).parameters.items())[1:]))
        and next(iter(parameters.values())).annotation == "bool"
    }
    # Its error is native's, a ValueError: it has rows of its own.
    assert switches.pop("set_reshard_after_forward") == "reshard_after_forward"
    # Asked for as an option of a setter, which it calls.
    assert switches.pop("no_sync") == "recurse"
    assert switches == settings.SWITCHES
