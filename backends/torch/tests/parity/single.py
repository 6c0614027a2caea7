"""Rank side: hpcompat against a single-process run where native FSDP2 raises or is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parity.combos import Combo
from parity.models import WIDTH, make_mlp, seeded, squared_error, vectors, wrap_blocks
from parity.registry import ALL_MODELS
from parity.setters import before_microbatch
from parity.settings import wrap_kwargs
from parity.training import sharded, units
from parity.truth import Truth, assert_gradients, assert_parameters, whole
from parity.worlds import implementation, named_mesh

RATE = 0.05
TOLERANCES = {"fp32": 2e-6, "bf16": 2e-6, "fp16": 5e-3}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_training(combo: dict[str, Any], divisor: float | None = None, tolerance: float | None = None) -> int:
    """Three SGD steps of hpcompat and of the plain model: gradients in every step, parameters at the end.

    `divisor` is what the sum of all ranks' gradients is divided by, the number of data-parallel ranks by default.
    Returns how many gradients were checked.
    """
    cell = Combo.from_dict(combo)
    model = ALL_MODELS[cell.model]
    module = sharded(model, cell, "hpcompat")
    divisor = float(dist.get_world_size()) if divisor is None else divisor
    truth = Truth(
        model.build(cell.seed), loss=model.loss, batches=model.batch, divisor=divisor, dtype=DTYPES[cell.policy]
    )
    near = TOLERANCES[cell.policy] if tolerance is None else tolerance
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, foreach=True)
    num_checked = 0
    for step in range(3):
        microbatches = range(step * cell.accumulation, (step + 1) * cell.accumulation)
        for micro in microbatches:
            before_microbatch(cell, units(module), is_last=micro == microbatches[-1])
            model.loss(module, model.batch(dist.get_rank(), micro)).backward()
        expected = truth.gradients(microbatches)
        if "fill-unused" in cell.options:
            fill(expected, truth.module)
        assert_gradients(module, expected, tolerance=near)
        num_checked += len(expected)
        optimizer.step()
        optimizer.zero_grad()
        truth.step(expected, rate=RATE)
        follow(truth.module, module, tolerance=near)
    return num_checked


def fill(expected: dict[str, Tensor], plain: nn.Module) -> None:
    """Unused parameters get zeros."""
    for fqn, parameter in plain.named_parameters():
        expected.setdefault(fqn, torch.zeros_like(parameter, dtype=torch.float64))


def follow(plain: nn.Module, module: nn.Module, *, tolerance: float) -> None:
    """Check that both have moved alike, then start the next step from exactly the same values."""
    assert_parameters(module, plain, tolerance=max(tolerance, 1e-5))
    values = {fqn: whole(parameter.detach()) for fqn, parameter in module.named_parameters()}
    with torch.no_grad():
        for fqn, parameter in plain.named_parameters():
            parameter.copy_(values[fqn])


def same_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The same data on every rank."""
    return vectors(WIDTH, 5)(0, step)


def biases(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for fqn, parameter in module.named_parameters() if fqn.endswith("bias")}


def split_by_kind(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """DTensors and plain tensors apart: torch's foreach functions refuse a mixture."""
    sharded_ones = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain_ones = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return [sharded_ones, plain_ones]


def clip(kinds: list[list[nn.Parameter]], limit: float) -> float:
    """Clip by the norm over all kinds; returns the norm before."""
    norms = [
        whole(torch.nn.utils.get_total_norm([parameter.grad for parameter in kind], foreach=True)) for kind in kinds
    ]
    total = torch.stack(norms).norm()
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, limit, total, foreach=True)
    return total.item()


def check_ignored(combo: dict[str, Any]) -> None:
    """Ignored parameters stay plain and local; foreach AdamW and clipping over both kinds equal the plain model's.

    All ranks see the same data, so that the unreduced gradients of ignored parameters equal the average.
    """
    cell = Combo.from_dict(combo)
    module, plain = make_pair(cell.seed)
    ignored = biases(module)
    wrap(cell, module, ignored_params=ignored)
    kinds = split_by_kind(list(module.parameters()))
    assert set(kinds[1]) == ignored, "expected exactly the ignored parameters to stay plain"
    ours = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=RATE, foreach=True)
    theirs = torch.optim.AdamW(plain.parameters(), lr=RATE, foreach=True)
    for step in range(5):
        for net in (module, plain):
            squared_error(net, same_batch(0, step)).backward()
        norm = clip(kinds, 0.1)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        assert math.isclose(norm, expected, rel_tol=1e-5), f"step {step}: norm {norm}, but plain {expected}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_parameters(module, plain, tolerance=1e-5)


def make_pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """The MLP twice."""
    build = seeded(make_mlp)
    return build(seed), build(seed)


def wrap(cell: Combo, module: nn.Module, *, replicates_biases: bool = False, **kwargs: Any) -> None:
    """Units on every block and the whole, by hpcompat."""
    source = implementation("hpcompat")
    arguments = {**wrap_kwargs(source, cell), **kwargs}

    def shard(unit: nn.Module, **options: Any) -> None:
        if replicates_biases:
            options["replicate_params"] = {bias for bias in biases(unit) if not isinstance(bias, DTensor)}
        source.fully_shard(unit, **options)

    wrap_blocks(module, shard, mesh=named_mesh(cell.mesh_shape, cell.mesh_axes), **arguments)


def check_replicated(combo: dict[str, Any]) -> None:
    """Replicated parameters are whole on every rank; gradients are averaged over all ranks, as for the sharded ones."""
    cell = Combo.from_dict(combo)
    module, plain = make_pair(cell.seed)
    shapes = {fqn: parameter.shape for fqn, parameter in plain.named_parameters()}
    wrap(cell, module, replicates_biases=True)
    for fqn, parameter in module.named_parameters():
        if fqn.endswith("bias"):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert local.shape == shapes[fqn], f"{fqn}: expected {shapes[fqn]} on every rank, but got {local.shape}"
    truth = Truth(
        plain, loss=squared_error, batches=vectors(WIDTH, 5), divisor=dist.get_world_size(), dtype=DTYPES[cell.policy]
    )
    optimizer = torch.optim.SGD([{"params": kind} for kind in split_by_kind(list(module.parameters()))], lr=RATE)
    for step in range(3):
        microbatches = range(step * cell.accumulation, (step + 1) * cell.accumulation)
        for micro in microbatches:
            before_microbatch(cell, units(module), is_last=micro == microbatches[-1])
            squared_error(module, vectors(WIDTH, 5)(dist.get_rank(), micro)).backward()
        expected = truth.gradients(microbatches)
        assert_gradients(module, expected, tolerance=TOLERANCES[cell.policy])
        optimizer.step()
        optimizer.zero_grad()
        truth.step(expected, rate=RATE)
        follow(plain, module, tolerance=TOLERANCES[cell.policy])


def check_conversion(combo: dict[str, Any], dtype: str) -> None:
    """`module.to(dtype)` after training has begun: the next steps run in the new dtype, with the right gradients."""
    cell = Combo.from_dict(combo)
    target = getattr(torch, dtype)
    module, plain = make_pair(cell.seed)
    wrap(cell, module)
    squared_error(module, vectors(WIDTH, 5)(dist.get_rank(), 0)).backward()
    module.zero_grad()
    module.to(target)
    plain.to(target)
    batches = converted(target)
    truth = Truth(plain, loss=double_error, batches=batches, divisor=dist.get_world_size())
    for step in range(2):
        double_error(module, batches(dist.get_rank(), step)).backward()
        for fqn, parameter in module.named_parameters():
            assert parameter.dtype == target, f"{fqn}: expected {target}, but got {parameter.dtype}"
        assert_gradients(module, truth.gradients([step]), tolerance=1e-12 if target is torch.float64 else 2e-2)
        module.zero_grad()


def converted(dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = vectors(WIDTH, 5)(rank, step)
        return inputs.to(dtype), targets.to(dtype)

    return batch


def double_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error in fp64."""
    inputs, targets = batch
    return F.mse_loss(module(inputs).double(), targets.double())
