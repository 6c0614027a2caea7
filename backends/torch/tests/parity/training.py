"""Rank side: train one model with one implementation and keep every number of every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parity.combos import Combo
from parity.models import ModelCase
from parity.registry import ALL_MODELS
from parity.setters import after_wrap, before_microbatch
from parity.settings import wrap_kwargs
from parity.worlds import half_public, implementation, named_mesh


@dataclass(frozen=True)
class Entry:
    """One recorded tensor (or the absence of one) with its place in the run."""

    step: int
    kind: str
    fqn: str
    value: Tensor | None


@dataclass
class Trace:
    """All that a run produced: entries in order, and the layout of every parameter."""

    entries: list[Entry] = field(default_factory=list)
    layouts: dict[str, str] = field(default_factory=dict)

    def add(self, step: int, kind: str, fqn: str, value: Tensor | None) -> None:
        self.entries.append(Entry(step, kind, fqn, None if value is None else local(value).detach().clone()))


def local(value: Tensor) -> Tensor:
    """This rank's part of a DTensor, anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def layout(parameter: Tensor) -> str:
    """Type, dtype, shapes and placements in words, to compare as text."""
    text = f"{parameter.dtype} {tuple(parameter.shape)} stride {parameter.stride()} grad {parameter.requires_grad}"
    if not isinstance(parameter, DTensor):
        return f"{type(parameter).__name__} {text}"
    mesh = parameter.device_mesh
    where = f"{parameter.placements} on {mesh.mesh.tolist()} {mesh.mesh_dim_names}"
    return f"DTensor {text} local {tuple(parameter._local_tensor.shape)} {where}"


def sharded(model: ModelCase, combo: Combo, name: str) -> nn.Module:
    """Build from the seed and wrap."""
    module = model.build(combo.seed)
    source = implementation(name)
    kwargs = wrap_kwargs(source, combo)
    wrapper = source.fully_shard
    if combo.mesh == "replicate":
        wrapper = half_public(source, "replicate")
        del kwargs["reshard_after_forward"]
    model.wrap(module, wrapper, mesh=named_mesh(combo.mesh_shape, combo.mesh_axes), **kwargs)
    after_wrap(source, combo, module)
    return module


def units(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to, whichever implementation did it."""
    return [child for child in module.modules() if hasattr(child, "set_requires_gradient_sync")]


def train(combo: Combo, name: str) -> Trace:
    """Run `combo.num_steps` AdamW steps of the model under implementation `name` and return the trace."""
    model = ALL_MODELS[combo.model]
    module = sharded(model, combo, name)
    optimizer = torch.optim.AdamW(optimized(combo, module), lr=1e-2, weight_decay=0.1, foreach=True)
    trace = Trace(layouts={fqn: layout(parameter) for fqn, parameter in module.named_parameters()})
    torch.manual_seed(combo.seed + torch.distributed.get_rank())
    for step in range(combo.num_steps):
        before_step(combo, model, module, trace, step)
        backward_all(combo, model, module, trace, step)
        record_gradients(trace, step, module)
        if "clip" in combo.options:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            trace.add(step, "norm", "all", norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        record_state(trace, step, module, optimizer)
        optimizer.zero_grad(set_to_none="keep-grads" not in combo.options)
    return trace


def optimized(combo: Combo, module: nn.Module) -> list[dict[str, Any]]:
    """Everything trainable, also what is frozen if it thaws later; by mesh, for foreach refuses a mixture."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad or "thaw" in combo.options:
            groups.setdefault(parameter.device_mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def before_step(combo: Combo, model: ModelCase, module: nn.Module, trace: Trace, step: int) -> None:
    """What some options do between two steps."""
    if "thaw" in combo.options and step == combo.num_steps // 2:
        module.requires_grad_(True)
    if "evaluate" in combo.options:
        evaluate(model, module, trace, step)
    if "state-dict" in combo.options:
        for fqn, value in module.state_dict().items():
            trace.add(step, "state-dict", fqn, value)


def backward_all(combo: Combo, model: ModelCase, module: nn.Module, trace: Trace, step: int) -> None:
    """Forward and backward of every microbatch of a step."""
    rank = torch.distributed.get_rank()
    for micro in range(combo.accumulation):
        before_microbatch(combo, units(module), is_last=micro == combo.accumulation - 1)
        loss = model.loss(module, model.batch(rank, step * combo.accumulation + micro)) / combo.accumulation
        trace.add(step, "loss", f"microbatch {micro}", loss)
        if "peek" in combo.options:
            record_registered(trace, step, module)
        if "backward-twice" in combo.options:
            loss.backward(retain_graph=True)
        loss.backward()


def evaluate(model: ModelCase, module: nn.Module, trace: Trace, step: int) -> None:
    """A loss without gradients, on data that training never sees."""
    module.eval()
    with torch.no_grad():
        trace.add(
            step, "loss", "evaluation", model.loss(module, model.batch(torch.distributed.get_rank(), 5000 + step))
        )
    module.train()


def record_registered(trace: Trace, step: int, module: nn.Module) -> None:
    """What is registered on the modules between forward and backward: shards, small shards or whole parameters."""
    for fqn, parameter in module.named_parameters():
        trace.layouts[f"{fqn} after forward"] = layout(parameter)
        trace.add(step, "registered", fqn, parameter)


def record_gradients(trace: Trace, step: int, module: nn.Module) -> None:
    for fqn, parameter in module.named_parameters():
        trace.add(step, "gradient", fqn, parameter.grad)


def record_state(trace: Trace, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Parameters, buffers and optimizer states after the optimizer's step."""
    for fqn, parameter in module.named_parameters():
        trace.add(step, "parameter", fqn, parameter)
        state = optimizer.state.get(parameter, {})
        for kind in ("exp_avg", "exp_avg_sq"):
            trace.add(step, kind, fqn, state.get(kind))
    for fqn, buffer in module.named_buffers():
        trace.add(step, "buffer", fqn, buffer)
