"""Gradients: who owns them, when they arrive, what scales them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import hpcompat
from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    fill,
    gradients,
    integers,
    loss_of,
    mlp,
    parameters,
    shard,
    train,
    true_gradients,
    whole,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy

BF16, FP32 = torch.bfloat16, torch.float32
# The first leaves the gradient's dtype alone, the second names it, the others make the reduction cast.
REDUCTIONS = [
    {"param_dtype": None, "reduce_dtype": None},
    {"param_dtype": None, "reduce_dtype": FP32},
    {"param_dtype": None, "reduce_dtype": BF16},
    {"param_dtype": BF16, "reduce_dtype": BF16},
    {"param_dtype": BF16, "reduce_dtype": FP32},
]


class Watched(nn.Linear):
    """Keeps the gradients of the parameters that it computes with: the tensors themselves, and what was in them."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__(WIDTH, 5, bias=bias)
        self.held: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(self.hold, name))
        return super().forward(inputs)

    def hold(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.held[name], self.copies[name] = parameter.grad, parameter.grad.clone()


@behaviour(
    reports=["mindspore-ai/hyper-parallel#629"],
    each=[{**reduction, "bias": bias} for reduction in REDUCTIONS for bias in (True, False)],
)
def gradients_that_the_user_holds_stay(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, bias: bool
) -> None:
    """Neither freed nor changed: not by their reduction, nor by accumulation into the sharded gradients later on."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = shard(fill(Watched(bias=bias)), mp_policy=policy)
    first: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    for step, sync in enumerate([True, False, False, True]):
        model.set_requires_gradient_sync(sync)
        model.held, model.copies = {}, {}
        loss_of(model, batch(step=step)).backward()
        assert model.held.keys() == ({"weight", "bias"} if bias else {"weight"})
        assert {held.dtype for held in model.held.values()} == {param_dtype or FP32}
        assert all(held.untyped_storage().nbytes() >= held.numel() * held.itemsize for held in model.held.values())
        assert_same_bits(model.held, model.copies)
        first = first or (model.held, model.copies)
    assert_same_bits(*first)


@behaviour(reports=["mindspore-ai/hyper-parallel#629"])
def gradients_of_earlier_steps_stay() -> None:
    """Set to none and kept by the user, they are not the buffers of the next step."""
    model = wrap(mlp())
    loss_of(model, batch()).backward()
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits({name: whole(value) for name, value in kept.items()}, true_gradients(mlp()))
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour(reports=["mindspore-ai/hyper-parallel#439"])
def backward_takes_the_gradient_of_the_output() -> None:
    """`output.backward(gradient=...)`, with gradients that differ by rank."""
    model = wrap(mlp())
    output = model(batch())
    output.backward(gradient=torch.arange(1, output.numel() + 1.0).view_as(output))
    assert_same_bits(gradients(model), true_gradients(mlp()))


@behaviour()
def several_outputs_get_their_gradients() -> None:
    """`torch.autograd.backward` over two losses of one forward is one backward."""
    model = wrap(mlp())
    output = model(batch())
    weights = torch.arange(1, output.numel() + 1.0).view_as(output)
    torch.autograd.backward([(output * weights)[:1].sum(), (output * weights)[1:].sum()])
    assert_same_bits(gradients(model), true_gradients(mlp()))


@behaviour(1, 2, 4, each=[{"norm_type": 2.0}, {"norm_type": 1.0}])
def torch_clips_wrapped_parameters(norm_type: float) -> None:
    """The norm counts every element once, over uneven and empty shards; clipped gradients follow."""
    model, wanted = wrap(mlp()), true_gradients(mlp())
    loss_of(model, batch()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
    true_norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in wanted.values()]), norm_type)
    torch.testing.assert_close(whole(norm), true_norm)
    clipped = {name: value / (true_norm + 1e-6) for name, value in wanted.items()}
    torch.testing.assert_close(gradients(model), clipped)


@behaviour(each=[{"num_microbatches": 1}, {"num_microbatches": 3}])
def post_accumulate_hooks_run_once_per_parameter(num_microbatches: int) -> None:
    """Also with gradient sync off in between: once per reduction, with the reduced gradient in place."""
    model = wrap(mlp())
    calls: dict[str, int] = {}

    def count(name: str, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor)
        assert parameter.grad is not None
        calls[name] = calls.get(name, 0) + 1

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: count(name, p))
    for index in range(num_microbatches):
        assert calls == {}
        model.set_requires_gradient_sync(index == num_microbatches - 1)
        loss_of(model, batch(step=index)).backward()
    assert calls == dict.fromkeys(dict(model.named_parameters()), 1)


@behaviour()
def optimizers_in_backward_train_the_same() -> None:
    """One optimizer per parameter, stepped and cleared from its hook."""
    model, reference = wrap(mlp()), wrap(mlp())
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(model, batch(step=number)).backward()
        assert not gradients(model)
    train(reference, steps=range(3))
    assert_same_bits(parameters(model), parameters(reference))


@behaviour(each=[{"sharded_dtype": FP32}, {"sharded_dtype": BF16}])
def main_gradients_stay_in_the_reduce_dtype(sharded_dtype: torch.dtype) -> None:
    """`.grad` stays empty; `main_grad` is fp32, accumulates, and is the user's to clear (MPR-10)."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, apply_grad_on_fp32_main_grad=True)
    model = wrap(mlp().to(sharded_dtype), mp_policy=policy)
    truth = true_gradients(mlp())
    for times in (1, 2):
        loss_of(model, batch()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None
            assert isinstance(parameter.main_grad, DTensor)
            assert parameter.main_grad.placements == parameter.placements
            assert parameter.main_grad.shape == parameter.shape
            assert torch.equal(whole(parameter.main_grad), times * truth[name])
            assert whole(parameter.main_grad).dtype == FP32
    for parameter in model.parameters():
        parameter.main_grad = None
    loss_of(model, batch()).backward()
    assert_same_bits({name: whole(p.main_grad) for name, p in model.named_parameters()}, truth)


SCALES = {"number": 0.5, "int": 2, "tensor": torch.tensor(4.0), "one-element": torch.tensor([0.25])}


@behaviour(each=[{"scale": scale} for scale in SCALES])
def scaling_factor_multiplies(scale: str) -> None:
    """On top of the average, in every unit of the tree; `None` ends it."""
    model, truth = wrap(mlp()), true_gradients(mlp())
    model.set_gradient_scaling_factor(SCALES[scale])
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), {name: value * float(SCALES[scale]) for name, value in truth.items()})
    model.zero_grad()
    model.set_gradient_scaling_factor(None)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), truth)


@behaviour()
def scaling_factor_multiplies_each_reduction_once() -> None:
    """Accumulated without sync, the sum is scaled; accumulated with sync, each part is."""
    truth = [true_gradients(mlp(), step=step) for step in range(2)]
    for sync in (False, True):
        model = wrap(mlp())
        model.set_gradient_scaling_factor(0.5)
        for step in range(2):
            model.set_requires_gradient_sync(sync or step == 1)
            loss_of(model, batch(step=step)).backward()
        assert_same_bits(gradients(model), {name: (truth[0][name] + truth[1][name]) * 0.5 for name in truth[0]})


@behaviour(1, 2, 4, each=[{"axes": 1}, {"axes": 2}])
def sum_is_a_divide_factor_of_one(axes: int) -> None:
    """To the last bit, on FSDP and HSDP meshes, with values that are not exact."""
    results = []
    for setting in ("sum", "factor"):
        torch.manual_seed(dist.get_rank())
        model = wrap(mlp(), mesh=data_parallel_mesh(axes))
        for unit in (child for child in model.modules() if hasattr(child, "set_gradient_divide_factor")):
            if setting == "factor":
                unit.set_gradient_divide_factor(1.0)
        if setting == "sum":
            model.set_reduce_op_type("sum")
        loss_of(model, torch.randn(3, WIDTH)).backward()
        results.append(gradients(model))
    assert_same_bits(*results)


@behaviour(1, 2, 4, each=[{"axes": 1}, {"axes": 2}])
def sum_is_the_average_times_the_ranks(axes: int) -> None:
    model = wrap(mlp(), mesh=data_parallel_mesh(axes))
    model.set_reduce_op_type("sum")
    loss_of(model, batch()).backward()
    truth = true_gradients(mlp())
    assert_same_bits(gradients(model), {name: value * dist.get_world_size() for name, value in truth.items()})
    model.zero_grad()
    model.set_reduce_op_type("avg")
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), truth)


def data_parallel_mesh(axes: int) -> Any:
    """All ranks, sharded; or in two rows of replicas where there are enough of them."""
    world_size = dist.get_world_size()
    if axes == 1:
        return init_device_mesh("cpu", (world_size,))
    rows = 2 if world_size > 2 else 1
    return init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))


@behaviour()
def sync_stream_completes_what_is_pending() -> None:
    """Called in the middle of backward, it delivers the gradients of the units that are done."""
    model = wrap(mlp())
    model.set_reduce_scatter_max_input_buffers(8)
    arrived: list[bool] = []

    def in_backward(grad: Tensor) -> None:
        model.hsdp_sync_stream()
        arrived.append(model[6].weight.grad is not None)

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(in_backward)

    model.hsdp_sync_stream()  # nothing has run yet
    model[1].register_forward_hook(watch)
    loss_of(model, batch()).backward()
    model.hsdp_sync_stream()  # nothing is left
    assert arrived == [True]
    assert_same_bits(gradients(model), true_gradients(mlp()))


class Siamese(nn.Module):
    """Two calls of one layer, each recomputed in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        calls = [checkpoint(self.layer, factor * inputs, use_reentrant=True) for factor in (1, 2)]
        return self.head(calls[0] + calls[1])


@behaviour(1, 2, 4, each=[{"head": True}, {"head": False}])
def a_unit_that_reentrant_checkpoints_run_twice(head: bool) -> None:
    """The second recomputation brings gradients after the unit has reduced those of the first."""
    truth, model = fill(Siamese()), fill(Siamese())
    shard(model.layer)
    if head:
        shard(model.head)
    shard(model)
    for step in range(2):
        model.zero_grad()
        loss_of(model, batch(step=step)).backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.layer.parameters()), "resharded"
        assert_same_bits(gradients(model), true_gradients(truth, step=step))


def loss_after_a_look(model: nn.Module, inputs: Tensor) -> Tensor:
    """Autocast keeps the casts of the weights that it made without gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(inputs)
        return loss_of(model, inputs).float()


@behaviour(1, 2, 4)
def a_forward_without_gradients_under_the_same_autocast() -> None:
    """The gradient of a cached cast comes when its unit has already reduced the others."""
    truth, model = mlp(), wrap(mlp())
    for step in range(2):
        model.zero_grad()
        loss_after_a_look(model, batch(step=step)).backward()
        assert_same_bits(gradients(model), true_gradients(truth, step=step, loss=loss_after_a_look))


class Mapped(nn.Module):
    """Calls its layers inside a transform of `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.func.vmap(self.second)(torch.func.vmap(self.first)(inputs))


@behaviour(1, 2, 4)
def units_inside_a_vmap_gather_in_backward() -> None:
    model = fill(Mapped())
    for layer in (model.first, model.second):
        shard(layer)
    shard(model)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(fill(Mapped())))


class Complex(nn.Module):
    """A complex parameter with rows for three ranks at most."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.complex(integers((3, WIDTH), seed=0), integers((3, WIDTH), seed=1)))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.view_as_real(inputs.to(torch.complex64) @ self.table.t()).sum(-1)


@behaviour(1, 2, 4, each=[{"norm_type": 2.0}, {"norm_type": 1.0}, {"norm_type": float("inf")}])
def complex_gradients_are_clipped(norm_type: float) -> None:
    """Their elements count by their absolute values."""
    truth, model = Complex(), shard(Complex())
    wanted = true_gradients(truth)["table"]
    loss_of(model, batch()).backward()
    norm = hpcompat.clip_grad_norm_(model, 1.0, norm_type=norm_type)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(wanted, norm_type))
    torch.testing.assert_close(gradients(model)["table"], wanted / (norm + 1e-6))
