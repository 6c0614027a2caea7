"""What surrounds an update: hooks, closures, schedulers, exceptions, other optimizers' own steps, the log."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from behaviour.models import batch, loss_of, mlp, wrap
from behaviour.registry import behaviour
from hpcompat.optim import optimizer_step
from hpcompat_torch import optim as room
from optimizers.cases import assert_equal_optimizers, set_gradients
from optimizers.steps import pair, sharded, take_steps


def snapshot(optimizer: Any) -> dict[str, Any]:
    """Which objects an optimizer consists of."""
    return {
        "state": {
            id(parameter): {key: id(value) for key, value in s.items()} for parameter, s in optimizer.state.items()
        },
        "groups": [{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups],
        "gradients": [id(p.grad) for group in optimizer.param_groups for p in group["params"]],
        "local gradients": [p._local_tensor.grad for group in optimizer.param_groups for p in group["params"]],
        "attributes": sorted(vars(optimizer)),
        "hooks": (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)),
    }


@behaviour(2)
def hooks_see_the_optimizer_as_it_is() -> None:
    """In torch's order, global and own, before and after, also those that were registered by others before."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    seen: dict[int, list[Any]] = {id(ours): [], id(theirs): []}

    def hook(name: str) -> Any:
        def record(optimizer: Any, args: Any, kwargs: Any) -> None:
            params = [type(p).__name__ for group in optimizer.param_groups for p in group["params"]]
            states = [type(p).__name__ for p in optimizer.state]
            kinds = sorted({type(v).__name__ for state in optimizer.state.values() for v in state.values()})
            foreach = [group["foreach"] for group in optimizer.param_groups]
            seen[id(optimizer)].append((name, params, states, kinds, foreach, len(args), sorted(kwargs)))

        return record

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(hook("own pre"))
        optimizer.register_step_post_hook(hook("own post"))
    try:
        take_steps(ours, theirs, steps=range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen[id(theirs)]) == 12
    assert seen[id(ours)] == seen[id(theirs)]


@behaviour(2)
def hooks_may_change_what_is_stepped() -> None:
    """A pre-hook that scales gradients or replaces the closure."""
    ours, theirs = pair(optim.SGD, dtype=torch.float32, lr=0.1)

    def double(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 2

    def with_closure(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return (args[0], lambda: 7.0), {}

    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(double)
        optimizer.register_step_pre_hook(with_closure)
    take_steps(ours, theirs, steps=range(2))
    assert_equal_optimizers(ours, theirs)
    assert optimizer_step(ours) == theirs.step() == 7.0


@behaviour(1, 2)
def closures_compute_the_gradients() -> None:
    """With grad enabled, on the sharded parameters, between the pre-hooks and the update; the loss is returned."""
    results = []
    for step in (lambda optimizer, closure: optimizer.step(closure), optimizer_step):
        model = wrap(mlp())
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        order: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, order=order: order.append("pre"))
        optimizer.register_step_post_hook(lambda *_, order=order: order.append("post"))

        def closure(optimizer: Any = optimizer, model: Any = model, order: list[str] = order) -> Tensor:
            order.append("closure")
            assert torch.is_grad_enabled()
            assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
            optimizer.zero_grad()
            loss = loss_of(model, batch())
            loss.backward()
            return loss

        losses = [step(optimizer, closure).item() for _ in range(3)]
        assert order == ["pre", "closure", "post"] * 3
        results.append((losses, optimizer))
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) > 1
    assert assert_equal_optimizers(results[1][1], results[0][1]) > 0


SCHEDULERS = {
    "step": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "one cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
}


@behaviour(2, each=[{"kind": kind} for kind in SCHEDULERS])
def schedulers_work(kind: str) -> None:
    """And know that the optimizer has stepped: no warning."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32, lr=0.1)
    schedulers = [SCHEDULERS[kind](optimizer) for optimizer in (ours, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            take_steps(ours, theirs, steps=range(step, step + 1))
            for scheduler in schedulers:
                scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() != [0.1]
    assert assert_equal_optimizers(ours, theirs) > 0


@behaviour(2)
def an_instance_with_a_step_of_its_own_keeps_it() -> None:
    """As libraries wrap them."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    calls = []
    original = ours.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    ours.step = counted
    take_steps(ours, theirs, steps=range(2))
    assert calls == [(), ()]
    assert assert_equal_optimizers(ours, theirs) > 0


@behaviour(2, each=[{"where": where} for where in ("pre-hook", "closure", "kernel", "first kernel", "post-hook")])
def an_exception_leaves_all_as_it_was(where: str) -> None:
    """Anywhere in the step; the next one goes on."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    if where != "first kernel":
        take_steps(ours, theirs, steps=range(2))
    set_gradients(ours.param_groups[0]["params"], step=50)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    handles = []
    if where.endswith("hook"):
        register = ours.register_step_pre_hook if where == "pre-hook" else ours.register_step_post_hook
        handles.append(register(fail))
    before = snapshot(ours)
    with pytest.MonkeyPatch.context() as patch:
        if where.endswith("kernel"):
            patch.setattr(torch, "_foreach_lerp_", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            optimizer_step(ours, fail if where == "closure" else None)
    assert snapshot(ours) == before
    for handle in handles:
        handle.remove()
    if where in ("pre-hook", "closure"):  # the update had not begun
        take_steps(ours, theirs, steps=range(2, 4))
        assert_equal_optimizers(ours, theirs)
    else:
        optimizer_step(ours)
        assert all(ours.state[parameter]["step"] >= 1 for parameter in ours.param_groups[0]["params"])


@behaviour(2)
def a_step_leaves_no_trace() -> None:
    ours, theirs = pair(optim.SGD, dtype=torch.float32, lr=0.1)
    take_steps(ours, theirs, steps=range(1))
    before = snapshot(ours)
    assert before["local gradients"] == [None] * 6
    optimizer_step(ours)
    optimizer_step(ours)
    assert snapshot(ours) == before


class Counted(TorchDispatchMode):
    """What reaches the dispatcher, and whether a DTensor was among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.distributed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if any(issubclass(kind, DTensor) for kind in types):
            self.distributed.append(str(func))
        return func(*args, **(kwargs or {}))


@behaviour(1, 2, reports=["pytorch/pytorch#134191"], each=[{"foreach": choice} for choice in (None, True)])
def a_step_runs_few_kernels_and_none_on_dtensors(foreach: bool | None) -> None:
    """As many as there are operations, not parameters."""
    model = sharded("hpcompat", dtype=torch.float32)
    optimizer = optim.AdamW(model.parameters(), foreach=foreach)
    for step in range(3):
        set_gradients(optimizer.param_groups[0]["params"], step=step)
        with Counted() as counted:
            optimizer_step(optimizer)
        assert counted.distributed == []
    in_bulk = [name for name in counted.names if "_foreach_" in name]
    assert any("_foreach_addcdiv_" in name for name in in_bulk)
    assert len(in_bulk) <= 10, in_bulk
    assert not any("addcdiv_.default" in name and name not in in_bulk for name in counted.names)


@behaviour(1)
def the_cpu_runs_the_loop_where_torch_does() -> None:
    """In bfloat16 the multi-tensor kernels have other bits there. [Note: the choice of kernels]"""
    model = sharded("hpcompat", dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    set_gradients(optimizer.param_groups[0]["params"], step=0)
    with Counted() as counted:
        optimizer_step(optimizer)
    assert not any("_foreach_" in name for name in counted.names)


@behaviour(1)
def profilers_see_the_step() -> None:
    model = sharded("hpcompat", dtype=torch.float32)
    optimizer = optim.AdamW(model.parameters())
    set_gradients(optimizer.param_groups[0]["params"], step=0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer_step(optimizer)
    assert [event.name for event in profiler.events()].count("Optimizer.step#AdamW.step") == 1


class Named(optim.AdamW):
    """A subclass that leaves the step alone."""


class Own(optim.AdamW):
    """A subclass that does not."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        return super().step(closure)


class Collecting(optim.AdamW):
    """A subclass that decides which parameters take part."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        return super()._init_group({**group, "params": group["params"][:1]}, *lists)


class Lamb(optim.Optimizer):
    """Scales the update of a tensor by the norms of the whole tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / (parameter.grad.norm() + 1.0)
                parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


OTHERS = {
    "own step": (Own, {"lr": 0.1}, True),
    "own collecting": (Collecting, {"lr": 0.1}, True),
    "subclass": (Named, {"lr": 0.1}, False),
    "differentiable": (optim.SGD, {"lr": 0.1, "differentiable": True}, True),
    "norms": (Lamb, {"lr": 0.1}, True),
}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@behaviour(2, each=[{"name": name} for name in OTHERS])
def other_optimizers_run_their_own_step(name: str) -> None:
    """On DTensors, which the log says once per class; subclasses that change nothing do not."""
    kind, options, own = OTHERS[name]
    ours, theirs = pair(kind, dtype=torch.float32, **options)
    messages, logger = Messages(), logging.getLogger("hpcompat")
    room._say_once.cache_clear()
    logger.addHandler(messages)
    try:
        if name == "differentiable":
            for optimizer in (ours, theirs):
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.requires_grad_(False)
        take_steps(ours, theirs, steps=range(2))
    finally:
        logger.removeHandler(messages)
    assert_equal_optimizers(ours, theirs)
    assert len(messages.texts) == own
    if own:
        assert kind.__qualname__ in messages.texts[0]
        assert "on distributed tensors" in messages.texts[0]
    if name == "own step":
        assert ours.num_steps == 2


@behaviour(1, 2)
def lbfgs_gets_its_closure() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.LBFGS([parameter], max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer_step(optimizer, closure) == 3.0
    assert parameter.norm() < 1.0


@behaviour(2)
def optimizers_in_backward_may_use_it() -> None:
    """One optimizer per parameter, stepped from its hook."""
    results = []
    for step in (lambda optimizer: optimizer.step(), optimizer_step):
        model = wrap(mlp())
        optimizers = {parameter: optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}

        def update(parameter: Any, optimizers: Any = optimizers, step: Any = step) -> None:
            step(optimizers[parameter])
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for number in range(3):
            loss_of(model, batch(step=number)).backward()
        results.append(list(optimizers.values()))
    for mine, other in zip(results[1], results[0], strict=True):
        assert_equal_optimizers(mine, other)


@behaviour(1, 2, reports=["huggingface/accelerate#3859"], each=[{"name": name} for name in ("AdamW", "Adagrad")])
def stale_parameters_are_refused(name: str) -> None:
    """As by `optimizer.step()`; Adagrad has made states for them already."""
    model = mlp()
    optimizer = getattr(optim, name)(model.parameters())
    wrap(model)
    with pytest.raises(ValueError, match="Create the optimizer after wrapping"):
        optimizer_step(optimizer)
