"""Optimizers to try, gradients that training meets and should not meet, and how two optimizers are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from parity.bits import bits

Options = dict[str, Any]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# By name: a class and options that make every branch of its update run.
ELEMENT_WISE: dict[str, tuple[type[Optimizer], Options]] = {
    "AdamW": (optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "AdamW defaults": (optim.AdamW, {}),
    "AdamW amsgrad": (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-6}),
    "Adam amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": (optim.SGD, {"lr": 1e-2}),
    "SGD momentum": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD nesterov": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "NAdam decoupled": (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "RAdam decoupled": (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Rprop": (optim.Rprop, {"lr": 1e-2}),
    "ASGD": (optim.ASGD, {"lr": 1e-2, "weight_decay": 0.1, "t0": 3}),
}


NATIVE_REFUSES = frozenset({"Rprop", "fused SGD momentum"})
"""Where a step over DTensors raises in torch: compared with the same optimizer over plain copies of the shards."""


def random_gradient(parameter: Tensor, *, seed: int) -> Tensor:
    """Of the parameter's local shape: magnitudes from 1 down to denormals, zeros among them."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(local.shape, generator=generator)
    scales = torch.tensor([1.0, 1e-3, 1e-8, 1.56e-8, 1e-20, 1e-39, 0.0])
    return (values * scales[torch.randint(len(scales), local.shape, generator=generator)]).to(local.dtype)


def set_gradients(parameters: Any, *, step: int, without: tuple[int, ...] = ()) -> None:
    """The same for parameters in the same order; those at ``without`` get none."""
    for number, parameter in enumerate(parameters):
        parameter.grad = None
        if number not in without:
            grad = random_gradient(parameter, seed=1000 * step + number)
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = DTensor(grad, parameter._spec, requires_grad=False) if is_sharded else grad


def local(value: Any) -> Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).detach()


def place(value: Any) -> str:
    """Type, dtype, shapes, device and placements in words."""
    if not isinstance(value, DTensor):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.device}"
    return (
        f"DTensor {value.dtype} {tuple(value.shape)} {value.stride()} local {tuple(value._local_tensor.shape)} "
        f"{value.placements} on {value.device_mesh.mesh.tolist()} grad {value.requires_grad}"
    )


def tensors_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Parameters, gradients and states by position and name, in the order in which the optimizer has them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        yield f"{number} parameter", parameter.detach()
        if parameter.grad is not None:
            yield f"{number} gradient", parameter.grad
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield f"{numbers[id(parameter)]} {key}", value


def assert_equal_optimizers(ours: Optimizer, theirs: Optimizer) -> int:
    """The same tensors to the last bit, on the same meshes and with the same placements. Returns how many elements of
    states were compared.
    """
    mine, other = dict(tensors_of(ours)), dict(tensors_of(theirs))
    assert list(mine) == list(other)
    count = 0
    for name, wanted in other.items():
        got = mine[name]
        assert place(got) == place(wanted), name
        differing = bits(local(got)) != bits(local(wanted))
        both_nan = local(got).isnan().reshape(-1) & local(wanted).isnan().reshape(-1)
        num_differing = int((differing & ~both_nan).sum())
        assert num_differing == 0, f"{name}: {num_differing} of {differing.numel()} elements differ"
        if not name.endswith(("parameter", "gradient", "step")):
            count += differing.numel()
    return count


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Rows that do not divide evenly, some fewer than ranks; random weights, the same everywhere."""
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 8), nn.ReLU(), nn.Linear(8, 1))
    return model.to(dtype)
