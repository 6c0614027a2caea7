"""Clipping where something is missing, not finite, offloaded, passed in another form, or wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from behaviour.models import all_ranks, batch, gradients, loss_of, mlp, whole, wrap
from behaviour.registry import behaviour
from hpcompat import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from hpcompat.optim import clip_grad_norm_
from hpcompat_torch import axes, mesh
from optimizers.cases import local, plain_model
from optimizers.norms import LAYOUTS, LIMIT, give, same_everywhere, true_norm, units
from parity.bits import bits
from parity.worlds import implementation, named_mesh


@behaviour(2, 4, reports=["ByteDance-Seed/VeOmni#974"], each=[{"order": order} for order in (2.0, math.inf)])
def empty_shards_take_part(order: float) -> None:
    """One row on several ranks; torch's own raises on one rank for inf and leaves the others waiting."""
    linear = fully_shard(nn.Linear(3, 1), mesh=all_ranks())
    wholes = give(linear)
    norm = clip_grad_norm_(linear.parameters(), LIMIT, norm_type=order)
    assert norm.item() == pytest.approx(true_norm(wholes, order), rel=1e-6)
    assert same_everywhere(norm)


@behaviour(2, 4, reports=["pytorch/pytorch#158719"], each=[{"order": order} for order in (2.0, math.inf, -math.inf)])
def ranks_without_gradients_take_part(order: float) -> None:
    """All of them on the last rank, some on others."""
    model = units(plain_model(), mesh=all_ranks())
    wholes = give(model)
    last = dist.get_world_size() - 1
    parameters = list(model.parameters())
    if dist.get_rank() == last:
        for parameter in parameters:
            parameter.grad = None
    kept = [
        grad[: min(len(grad), last * -(-len(grad) // dist.get_world_size()))] for grad in wholes
    ]  # without the last rank's rows
    norm = clip_grad_norm_(parameters, LIMIT, norm_type=order)
    assert norm.item() == pytest.approx(true_norm(kept, order), rel=1e-6)
    assert same_everywhere(norm)


@behaviour(1, 2)
def without_gradients_the_norm_is_zero() -> None:
    model = units(plain_model(), mesh=all_ranks())
    assert clip_grad_norm_(model, 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0
    with pytest.warns(UserWarning, match="an iterator with nothing left"):
        clip_grad_norm_(iter(()), 1.0)


@behaviour(2, each=[{"order": order, "bad": bad} for order in (2.0, math.inf) for bad in (math.inf, math.nan)])
def what_is_not_finite_is_seen_by_all(order: float, bad: float) -> None:
    """On one rank only; raising leaves the gradients as they are, on all."""
    model = units(plain_model(), mesh=all_ranks())
    give(model)
    first = next(model.parameters())
    if dist.get_rank() == 1:
        first.grad._local_tensor[0, 0] = bad
    before = [local(parameter.grad).clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model, 1.0, norm_type=order, error_if_nonfinite=True)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(bits(local(parameter.grad)), bits(value))
    norm = clip_grad_norm_(model, 1.0, norm_type=order)
    assert not math.isfinite(norm.item())
    assert math.isnan(norm.item()) == math.isnan(bad)
    assert same_everywhere(norm) or math.isnan(bad)


@behaviour(2)
def ranks_agree_on_plain_parameters() -> None:
    """Gradients of ignored parameters that differ by rank: all scale the shards alike, by the largest norm."""
    for order in (2.0, math.inf):
        model = LAYOUTS["mixed"](plain_model())
        wholes = give(model)
        factor = 10.0 if dist.get_rank() == 1 else 1.0
        plain = [number for number, p in enumerate(model.parameters()) if not isinstance(p, DTensor)]
        for number, parameter in enumerate(model.parameters()):
            if number in plain:
                parameter.grad *= factor
                wholes[number] *= 10.0
        norm = clip_grad_norm_(model, LIMIT, norm_type=order)
        assert norm.item() == pytest.approx(true_norm(wholes, order), rel=1e-6)
        assert same_everywhere(norm)


@behaviour(1, 2, reports=["pytorch/pytorch#176076"])
def tied_parameters_count_once() -> None:
    """Also where the caller names one twice."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=all_ranks())
    (wholes,) = [give(model)]
    assert len(wholes) == 1
    names = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    assert len(names) == 2
    for parameters in (names, model):
        give(model)
        assert clip_grad_norm_(parameters, 1.0).item() == pytest.approx(true_norm(wholes, 2.0), rel=1e-6)


@behaviour(1, 2)
def what_is_passed_may_be_anything_with_parameters() -> None:
    """A module, a parameter, lists, generators, views of dicts; whatever the modules show at the moment."""
    model = mlp()
    fully_shard(model[0], mesh=all_ranks())
    fully_shard(model, mesh=all_ranks())
    loss_of(model, batch()).backward()
    wanted = true_norm([grad.double() for grad in gradients(model).values()], 2.0)
    named = dict(model.named_parameters())
    for parameters in (model, model.parameters(), list(named.values()), named.values(), tuple(named.values())):
        assert clip_grad_norm_(parameters, 1e9).item() == pytest.approx(wanted, rel=1e-6)
    first = next(model.parameters())
    assert clip_grad_norm_(first, 1e9).item() == pytest.approx(whole(first.grad).norm().item(), rel=1e-6)
    with torch.no_grad():
        model(batch())  # the root stays unsharded
    assert not isinstance(model[2].weight, DTensor)
    for parameters in (model, model.parameters()):
        assert clip_grad_norm_(parameters, 1e9).item() == pytest.approx(wanted, rel=1e-6)
    assert clip_grad_norm_(model, 0.5, "inf").item() > 0
    assert clip_grad_norm_(model, torch.tensor(0.5), 2, False, None).item() > 0


@behaviour(2, reports=["mindspore-ai/hyper-parallel#396"])
def main_gradients_count() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True
    )
    model = wrap(mlp(), mp_policy=policy)
    loss_of(model, batch()).backward()
    before = {name: whole(parameter.main_grad).double() for name, parameter in model.named_parameters()}
    expected = true_norm(list(before.values()), 2.0)
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(expected, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(whole(parameter.main_grad).double(), before[name] / expected, rtol=1e-5, atol=0)


@behaviour(2, reports=["mindspore-ai/hyper-parallel#612", "pytorch/pytorch#148532"])
def cpu_offload_works() -> None:
    model = wrap(mlp(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    loss_of(model, batch()).backward()
    expected = true_norm([grad.double() for grad in gradients(model).values()], 2.0)
    norm = clip_grad_norm_(model, 1.0)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert norm.device.type == "cpu"


@behaviour(2, reports=["mindspore-ai/hyper-parallel#612"])
def numbers_travel_on_the_device_of_the_mesh() -> None:
    """A group that knows no CPU tensors, as with an accelerator under CPU offload: stood in for by the meta device."""
    model = units(plain_model(), mesh=all_ranks())
    give(model)
    seen: list[str] = []

    def accelerator_only(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if tensor.device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")
        seen.append(tensor.device.type)
        raise KeyboardInterrupt  # a meta tensor has no value to go on with

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", accelerator_only)
        patch.setattr(axes.meshes, "device_of", lambda mesh: torch.device("meta"))
        with pytest.raises(KeyboardInterrupt):
            clip_grad_norm_(model, 1.0)
    assert seen == ["meta"]
    assert mesh.device_of(all_ranks()).type == "cpu"


@behaviour(2, reports=["verl-project/verl#2282"])
def the_norm_is_that_before_clipping() -> None:
    model = units(plain_model(), mesh=all_ranks())
    give(model)
    first, second = clip_grad_norm_(model, LIMIT).item(), clip_grad_norm_(model, LIMIT).item()
    assert first > LIMIT
    assert second == pytest.approx(LIMIT, rel=1e-5)
    third = clip_grad_norm_(model, 10.0).item()
    assert third == pytest.approx(LIMIT, rel=1e-5), "gradients are never made larger"


@behaviour(2)
def native_modules_are_clipped_too() -> None:
    model = plain_model()
    implementation("native").fully_shard(model, mesh=all_ranks())
    wholes = give(model)
    assert clip_grad_norm_(model, 1.0).item() == pytest.approx(true_norm(wholes, 2.0), rel=1e-6)


@behaviour(2)
def partial_parameters_are_refused() -> None:
    parameter = DTensor.from_local(torch.ones(2), all_ranks(), [Partial()], run_check=False)
    with pytest.raises(ValueError, match="expected parameters that are sharded or replicated, but got P"):
        clip_grad_norm_([parameter], 1.0)


@behaviour(2)
def wrong_meshes_are_refused() -> None:
    first, other = named_mesh((2,), ("fsdp",)), named_mesh((1, 2), ("a", "b"))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), first, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4), other, [Replicate(), Shard(0)])
    with pytest.raises(ValueError, match="expected a gradient on the mesh of its parameter"):
        clip_grad_norm_([parameter], 1.0)


@behaviour(1, 2)
def originals_are_refused_and_copies_are_their_own() -> None:
    """A list that was made before wrapping; a copy that carries what the original was marked with."""
    model = mlp()
    before = list(model.parameters())
    wrap(model)
    loss_of(model, batch()).backward()
    with pytest.raises(ValueError, match="expected sharded parameters, but got 'weight' as it was before fully_shard"):
        clip_grad_norm_(before, 1.0)
    copied = copy.deepcopy(next(model.parameters()))
    copied.grad = torch.zeros_like(copied)
    assert clip_grad_norm_(copied, 1.0).item() == 0.0
