"""Rank side: what a model sends over the wire, in order.

[Note: two ways of looking] The dispatcher sees every collective, whoever issued it and through whatever function, but
it does not show the reduction's operator. The public functions of `torch.distributed` do, and calling those, looked up
at call time, is part of the contract. So the operator is that of the public call around the dispatched one, and
`unseen` if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parity.combos import Combo
from parity.models import ModelCase
from parity.plants import planted
from parity.registry import ALL_MODELS
from parity.setters import before_microbatch
from parity.training import sharded, units

PUBLIC_FUNCTIONS = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
)

KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}

NOT_SENT = {"wait_tensor", "_wrap_tensor_autograd"}
"""Operators of the functional collectives' namespace that send nothing."""


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the ranks of its group, elements in the first tensor argument, dtype, operator."""

    kind: str
    ranks: tuple[int, ...]
    numel: int
    dtype: str
    op: str

    def __str__(self) -> str:
        return f"{self.kind}[{self.numel} x {self.dtype}] over {list(self.ranks)} {self.op}"


class Recorder(TorchDispatchMode):
    """Keeps every collective that passes the dispatcher while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []
        self.op: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and packet_of(func) not in NOT_SENT:
            self.seen.append(self.describe(func, args))
        return func(*args, **(kwargs or {}))

    def describe(self, func: Any, args: tuple[Any, ...]) -> Collective:
        packet = packet_of(func)
        tensor = next(iter(tensors_of(args)))
        group = next((found for found in map(process_group, args) if found is not None), None)
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        op = "-" if packet == "_allgather_base_" else (self.op or "unseen")
        return Collective(KINDS.get(packet, packet), ranks, tensor.numel(), str(tensor.dtype), op)

    @contextmanager
    def public_calls(self) -> Iterator[None]:
        """Watch the public functions for the operator of the reduction under way."""
        with ExitStack() as stack:
            for name in PUBLIC_FUNCTIONS:
                original = getattr(dist, name, None)
                if original is not None:
                    stack.enter_context(mock.patch.object(dist, name, self.watching(original)))
            yield

    def watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.op
            found = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)
            ]
            self.op = str(found[0]).rpartition(".")[2] if found else "SUM"
            try:
                return original(*args, **kwargs)
            finally:
                self.op = before

        return call


def tensors_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def packet_of(func: Any) -> str:
    """The operator's name without namespace and overload."""
    return str(func.overloadpacket.__name__)


def process_group(value: Any) -> dist.ProcessGroup | None:
    """The process group behind a dispatcher argument, an object or a registered name; None if it is something else."""
    if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
        return dist.distributed_c10d._resolve_process_group(value)
    if not isinstance(value, torch.ScriptObject) or "ProcessGroup" not in str(value._type()):
        return None
    return dist.ProcessGroup.unbox(value)


def training(combo: Combo, model: ModelCase, module: nn.Module) -> None:
    """Two steps, each of `combo.accumulation` microbatches."""
    rank = dist.get_rank()
    for step in range(2):
        for micro in range(combo.accumulation):
            before_microbatch(combo, units(module), is_last=micro == combo.accumulation - 1)
            model.loss(module, model.batch(rank, step * combo.accumulation + micro)).backward()
        module.zero_grad()


def evaluation(combo: Combo, model: ModelCase, module: nn.Module) -> None:
    """A step, two forwards without gradients, another step, a forward without backward."""
    rank = dist.get_rank()
    for step in range(2):
        model.loss(module, model.batch(rank, step)).backward()
        with torch.no_grad():
            model.loss(module, model.batch(rank, 10 + step))
            model.loss(module, model.batch(rank, 20 + step))
    with torch.inference_mode():
        model.loss(module, model.batch(rank, 30))


PHASES: dict[str, Callable[[Combo, ModelCase, nn.Module], None]] = {"training": training, "evaluation": evaluation}


def collectives(
    combo: dict[str, Any],
    phase: str,
    names: tuple[str, ...] = ("hpcompat", "native"),
    plant: str | None = None,
) -> list[list[str]]:
    """What each implementation sends in the phase, in order, as text. `plant` is active while hpcompat runs."""
    cell = Combo.from_dict(combo)
    model = ALL_MODELS[cell.model]
    lists = []
    for name in names:
        recorder = Recorder()
        with planted(plant if name == "hpcompat" else None):
            module = sharded(model, cell, name)
            with recorder.public_calls(), recorder:
                PHASES[phase](cell, model, module)
        lists.append([str(collective) for collective in recorder.seen])
    return lists
