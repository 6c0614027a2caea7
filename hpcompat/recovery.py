"""What the root of a wrapped model offers after an exception in a step; mixed into :class:`hpcompat.HSDPModule`.

``docs/recovery.md`` says which exceptions can be recovered from, and how ranks drop a step together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcompat.core.unit import Unit


class Recovery:
    """To be called on the root: the module whose forward is run."""

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: back to a clean iteration (REC-01, REC-02).

        Waits for what is in flight, drops every pending gradient (unsharded, accumulated without sync, partially
        reduced), reshards, and forgets the order of the iteration. Gradients already on the shards stay: zero them as
        usual.

        Raises:
            RuntimeError: not called on the root.
        """
        unit = self._root("reset_iter_state")
        if unit.is_root is None:
            # Nothing has run forward, but an unshard by hand may be pending.
            for below in self._units(recurse=True):
                below.reset_iter_state()
        unit.iteration.reset()

    def begin_step(self) -> int:
        """Before a step that :meth:`catch_up` may have to repeat: reshard, and tell where the step begins.

        Call it on every rank alike, while no gradients wait for their reduction.

        Raises:
            RuntimeError: not called on the root.
        """
        unit = self._root("begin_step")
        for below in unit.iteration.units or self._units(recurse=True):
            for group in below.groups:
                group.drop_gather()
                group.to_sharded()
        return unit.comm_ctx.num_issued

    @contextmanager
    def catch_up(self, start: int) -> Iterator[None]:
        """On a rank that raised in the middle of a step: run the step again inside, for the other ranks' sake.

        They wait for the collectives that this rank has not come to. The first ones of the repeated step, which this
        rank has taken part in before it raised, give zeros without communication; the rest are real. So what runs
        inside must pass the same collectives as the step, as a dummy batch does, and its results are worthless: every
        rank has to drop the step (:func:`hpcompat.agree`, then ``reset_iter_state`` and ``zero_grad``).

        Args:
            start: what :meth:`begin_step` returned.

        Raises:
            RuntimeError: not called on the root, or what ran inside was shorter than what had run before it raised.
            ValueError: ``start`` is not where a step of this model began.
        """
        unit = self._root("catch_up")
        self.reset_iter_state()
        with unit.comm_ctx.catching_up(start):
            yield

    def _root(self, method: str) -> Unit:
        unit = self._unit()
        if unit.is_root is False:
            raise RuntimeError(
                f"{method} must be called on the root FSDP module, but got {unit.fqn!r}; call it on the module whose "
                "forward was run"
            )
        return unit

    if TYPE_CHECKING:  # HSDPModule has them

        def _unit(self) -> Unit: ...
        def _units(self, recurse: bool) -> Iterator[Unit]: ...
