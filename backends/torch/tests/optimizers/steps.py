"""`optimizer_step` against `optimizer.step()` on native FSDP2: bits of parameters and states, and their form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from behaviour.registry import behaviour
from hpcompat.optim import optimizer_step
from optimizers.cases import (
    DTYPES,
    ELEMENT_WISE,
    NATIVE_REFUSES,
    assert_equal_optimizers,
    local,
    plain_model,
    set_gradients,
    tensors_of,
)
from parity.bits import bits
from parity.worlds import implementation, named_mesh

MESHES = {"fsdp": (("fsdp",), lambda size: (size,)), "hsdp": (("replicate", "shard"), lambda size: (2, size // 2))}


def sharded(name: str, *, dtype: torch.dtype, layout: str = "fsdp") -> nn.Module:
    """The model wrapped by ``"hpcompat"`` or ``"native"``, a unit per layer."""
    axes, shape = MESHES[layout]
    mesh = named_mesh(shape(dist.get_world_size()), axes)
    model, fully_shard = plain_model(dtype), implementation(name).fully_shard
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def pair(kind: type[Any], *, dtype: torch.dtype, layout: str = "fsdp", **options: Any) -> tuple[Any, Any]:
    """The optimizer over our model, and over native's."""
    return tuple(  # type: ignore[return-value]
        kind(sharded(name, dtype=dtype, layout=layout).parameters(), **options) for name in ("hpcompat", "native")
    )


def plain_copies(optimizer: Any, kind: type[Any], **options: Any) -> Any:
    """The same optimizer over plain parameters with the values of this rank's shards."""
    parameters = [nn.Parameter(local(parameter).clone()) for parameter in optimizer.param_groups[0]["params"]]
    return kind(parameters, **options)


def assert_same_as_plain(ours: Any, plain: Any) -> int:
    """Parameters and states of this rank's shards; returns how many elements of states."""
    mine = {name: local(value) for name, value in tensors_of(ours)}
    other = dict(tensors_of(plain))
    assert list(mine) == list(other)
    for name, value in other.items():
        assert torch.equal(bits(mine[name]), bits(value)), name
    return sum(value.numel() for name, value in other.items() if not name.endswith(("parameter", "gradient", "step")))


def take_steps(ours: Any, theirs: Any, *, steps: range, without: dict[int, tuple[int, ...]] | None = None) -> None:
    """With the same gradients; ``without`` says which parameters have none in a step."""
    for step in steps:
        for optimizer in (ours, theirs):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            set_gradients(parameters, step=step, without=(without or {}).get(step, ()))
        optimizer_step(ours)
        theirs.step()


def assert_native_refuses(optimizer: Any) -> None:
    """If this fails, torch has learnt it: take the name out of ``NATIVE_REFUSES``."""
    set_gradients(optimizer.param_groups[0]["params"], step=0)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"DTensor|aten"):
        optimizer.step()


@behaviour(
    2,
    4,
    reports=["mindspore-ai/hyper-parallel#700"],
    each=[{"name": name, "dtype": dtype} for name in ELEMENT_WISE for dtype in DTYPES],
    strength=2,
)
def element_wise_steps_are_native_steps(name: str, dtype: torch.dtype) -> None:
    """Whatever the choice of kernels, on uneven and empty shards."""
    kind, options = ELEMENT_WISE[name]
    for foreach in (None, True, False):
        ours, theirs = pair(kind, dtype=dtype, foreach=foreach, **options)
        if name in NATIVE_REFUSES:
            assert_native_refuses(theirs)
            theirs = plain_copies(ours, kind, foreach=foreach, **options)
        take_steps(ours, theirs, steps=range(6))
        compared = (assert_same_as_plain if name in NATIVE_REFUSES else assert_equal_optimizers)(ours, theirs)
        assert compared > 0 or name == "SGD"


@behaviour(2, reports=["mindspore-ai/hyper-parallel#700"], each=[{"name": name} for name in ("AdamW", "SGD momentum")])
def fused_steps_are_native_fused_steps(name: str) -> None:
    kind, options = ELEMENT_WISE[name]
    options = {**options, "fused": True}
    ours, theirs = pair(kind, dtype=torch.float32, **options)
    refused = f"fused {name}" in NATIVE_REFUSES
    if refused:
        assert_native_refuses(theirs)
        theirs = plain_copies(ours, kind, **options)
    take_steps(ours, theirs, steps=range(3))
    assert (assert_same_as_plain if refused else assert_equal_optimizers)(ours, theirs) > 0


@behaviour(4, reports=["huggingface/accelerate#3905"], each=[{"dtype": dtype} for dtype in DTYPES])
def hsdp_steps_are_native_steps(dtype: torch.dtype) -> None:
    ours, theirs = pair(optim.AdamW, dtype=dtype, layout="hsdp")
    take_steps(ours, theirs, steps=range(3))
    assert assert_equal_optimizers(ours, theirs) > 0


@behaviour(2, each=[{"name": name} for name in ("AdamW", "SGD", "SGD momentum", "ASGD", "Adagrad")])
def gradients_may_come_and_go(name: str) -> None:
    """A parameter without a gradient is left alone; it gets its states with its first one."""
    kind, options = ELEMENT_WISE[name]
    ours, theirs = pair(kind, dtype=torch.float32, **options)
    everything = tuple(range(6))
    without = {0: (0, 3), 1: (0, 3), 2: (3,), 3: everything, 4: (0, 1), 5: ()}
    for step in range(8):
        take_steps(ours, theirs, steps=range(step, step + 1), without=without)
        assert_equal_optimizers(ours, theirs)


@behaviour(2, each=[{"name": name} for name in ("AdamW", "SGD", "SGD momentum", "RMSprop")])
def options_may_change_between_steps(name: str) -> None:
    kind, options = ELEMENT_WISE[name]
    ours, theirs = pair(kind, dtype=torch.bfloat16, **options)
    changes: list[dict[str, Any]] = [{"lr": 0.5}, {"weight_decay": 0.3}, {"foreach": True}, {}, {"foreach": False}]
    if name == "SGD":
        changes += [{"momentum": 0.5}, {}, {"momentum": 0.0}, {}, {"momentum": 0.9}]
    for step, change in enumerate([{}, {}, *changes]):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0].update(change)
        take_steps(ours, theirs, steps=range(step, step + 1))
        assert_equal_optimizers(ours, theirs)


@behaviour(2)
def both_calls_may_take_turns() -> None:
    """The states that one makes are those that the other goes on with."""
    ours, theirs = pair(optim.AdamW, dtype=torch.bfloat16, betas=(0.9, 0.95))
    for step in range(6):
        take_steps(ours, theirs, steps=range(step, step + 1))
        for optimizer in (ours, theirs):
            set_gradients(optimizer.param_groups[0]["params"], step=100 + step)
            optimizer.step()
        assert_equal_optimizers(ours, theirs)


@behaviour(2)
def states_may_be_replaced_and_cleared() -> None:
    """What a user does to states between two steps counts in the next: moved away and back, reset, all forgotten."""
    ours, theirs = pair(optim.AdamW, dtype=torch.float32)
    take_steps(ours, theirs, steps=range(2))
    for optimizer in (ours, theirs):
        first, second, third = optimizer.param_groups[0]["params"][:3]
        for key, value in optimizer.state[first].items():
            optimizer.state[first][key] = value.clone() * 2
        optimizer.state[second].clear()
        optimizer.state[third]["exp_avg"].zero_()
    take_steps(ours, theirs, steps=range(2, 4))
    assert_equal_optimizers(ours, theirs)
    for optimizer in (ours, theirs):
        optimizer.state.clear()
    take_steps(ours, theirs, steps=range(4, 6))
    assert_equal_optimizers(ours, theirs)


@behaviour(
    2,
    reports=["huggingface/accelerate#3971", "databricks/flashoptim#3"],
    each=[{"name": name} for name in ELEMENT_WISE if name not in NATIVE_REFUSES],
)
def state_dicts_go_back_and_forth(name: str) -> None:
    """The structure is native's, and a loaded optimizer goes on with the same bits."""
    kind, options = ELEMENT_WISE[name]
    ours, theirs = pair(kind, dtype=torch.bfloat16, **options)
    take_steps(ours, theirs, steps=range(3))
    saved = {who: copy.deepcopy(optimizer.state_dict()) for who, optimizer in (("ours", ours), ("theirs", theirs))}
    assert saved["ours"]["param_groups"] == saved["theirs"]["param_groups"]
    take_steps(ours, theirs, steps=range(3, 5))
    ours.load_state_dict(saved["theirs"])
    theirs.load_state_dict(saved["ours"])
    take_steps(ours, theirs, steps=range(5, 8))
    assert_equal_optimizers(ours, theirs)


@behaviour(2)
def groups_may_be_added() -> None:
    def with_two_groups(name: str) -> Any:
        first, *others = sharded(name, dtype=torch.float32).parameters()
        optimizer = optim.AdamW([first], lr=0.1)
        optimizer.others = others  # type: ignore[attr-defined]
        return optimizer

    ours, theirs = with_two_groups("hpcompat"), with_two_groups("native")
    take_steps(ours, theirs, steps=range(2))
    for optimizer in (ours, theirs):
        optimizer.add_param_group({"params": optimizer.others, "weight_decay": 0.5})
    take_steps(ours, theirs, steps=range(2, 5))
    assert assert_equal_optimizers(ours, theirs) > 0
