"""Peak bytes of what an implementation allocates during a step, by one method that knows neither implementation.

A dispatch mode sees every operator of the step (forward, backward, collectives and copies alike; an operator on a
DTensor is seen as the operators on its local tensor). Every storage that goes in or comes out is remembered by a weak
reference, and after each operator the addresses that storages still alive cover are counted. Addresses, because
several storages may be windows of one: a byte counts once. A storage that was resized in place counts with its size of
that moment, one resized to 0 counts nothing, and one that only waits in a cache for its next use counts in full. Left
out is the memory that is there anyway: the sharded parameters' and the input's. The profiler's memory events would not
do: gloo's threads often drop the last reference to a buffer, and the profiler does not see what those threads free.

Three quantities:

`unsharded`: peak bytes of whole parameters and gather buffers. Separated from all else by running the step with frozen
parameters and one token of input that requires a gradient: both passes gather and free as always, but there are no
parameter gradients, and activations are a few KB (the `bare` column, which has nothing else).

`one_token`: the same step with trainable parameters: whole and sharded gradients and reduction buffers count too.

`step`: peak bytes of the step that is timed, with its activations.

`bare` is the model without sharding; its own parameters are left out, its gradients are whole.

Peaks are the smallest over a few identical steps (gloo's threads may hold a buffer for a moment longer than its
owner), on the rank where they are largest.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paired.cases import Case
from paired.sides import SIDES, SideName, shard

QUANTITIES: dict[str, dict[str, bool]] = {
    "unsharded": {"frozen": True, "one_token": True},
    "one_token": {"frozen": False, "one_token": True},
    "step": {"frozen": False, "one_token": False},
}
NUM_WARMUP_STEPS = 2
NUM_WATCHED_STEPS = 5


Range = tuple[int, int]
"""Addresses from the first byte to the one after the last."""


def range_of(storage: torch.UntypedStorage) -> Range:
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same addresses as sorted ranges of which no two touch."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif stop > start:
            result.append((start, stop))
    return result


def num_covered(ranges: Iterable[Range]) -> int:
    """How many addresses lie in at least one of `ranges`."""
    return sum(stop - start for start, stop in merged(ranges))


class StorageWatch(TorchDispatchMode):
    """Peak of the bytes in storages that operators touch, without the memory of `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self._known_ranges = merged(range_of(storage) for storage in self._known.values())
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ranges: dict[int, Range] = {}
        # The sizes of all, windows or not, so that where this is below the peak the bytes covered are too.
        self._bound = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor runs the operator on local tensors, which then come by here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for operand in tree_leaves((args, kwargs, result)):
            if isinstance(operand, Tensor) and not isinstance(operand, DTensor):
                self._note(operand.untyped_storage())
        if self._bound > self.peak_bytes:
            # Storages resized to 0 since they last came by still count in full: look again before believing it.
            for storage in [storage for ref in self._refs.values() if (storage := ref()) is not None]:
                self._note(storage)
            covered = num_covered([*self._known_ranges, *self._ranges.values()]) - num_covered(self._known_ranges)
            self.peak_bytes = max(self.peak_bytes, covered)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._ranges[key] = (0, 0)
        self._resize(key, range_of(storage))

    def _resize(self, key: int, addresses: Range) -> None:
        index = bisect_right(self._known_ranges, addresses[0], key=itemgetter(0)) - 1
        if index >= 0 and addresses[1] <= self._known_ranges[index][1]:
            addresses = (0, 0)  # a window of what is known
        start, stop = self._ranges[key]
        self._bound += addresses[1] - addresses[0] - (stop - start)
        self._ranges[key] = addresses

    def _forget(self, key: int) -> None:
        self._resize(key, (0, 0))
        del self._refs[key], self._ranges[key]


def measure_peaks(
    case: Case, *, ours: str, mesh: DeviceMesh, device: torch.device, rank: int
) -> dict[str, dict[str, int]]:
    """Quantity -> side -> bytes; all ranks call this together."""
    peaks: dict[str, dict[str, int]] = {quantity: {} for quantity in QUANTITIES}
    for quantity, kind in QUANTITIES.items():
        frozen = kind["frozen"]
        for name in SIDES:
            model = _make_model(case, name=name, ours=ours, mesh=mesh, device=device, frozen=frozen)
            batch = case.make_input(device, rank=rank, one_token=kind["one_token"]).requires_grad_(frozen)
            peaks[quantity][name] = _peak_of_step(model, batch=batch, device=device)
    return peaks


def _make_model(
    case: Case, *, name: SideName, ours: str, mesh: DeviceMesh, device: torch.device, frozen: bool
) -> nn.Module:
    model = case.make_model(device).requires_grad_(not frozen)
    if name != "bare":
        shard(model, implementation=ours if name == "ours" else "native", mesh=mesh)
    return model


def _peak_of_step(model: nn.Module, *, batch: Tensor, device: torch.device) -> int:
    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad(set_to_none=True)
        batch.grad = None

    for _ in range(NUM_WARMUP_STEPS):
        step()
    peaks = []
    for _ in range(NUM_WATCHED_STEPS):
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        with StorageWatch([batch.detach(), *(parameter.detach() for parameter in parameters)]) as watch:
            step()
        peaks.append(watch.peak_bytes)
    largest = torch.tensor(min(peaks), device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())
