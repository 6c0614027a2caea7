"""States: which dtype, when they are made, what a checkpoint holds of them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate

from behaviour.models import assert_same_bits, batch, loss_of, mlp, whole, wrap
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy
from hpcompat.optim import SGD, Adam, AdamW, optimizer_step, zero_grad
from hpcompat_torch.optim import init_state
from optimizers.cases import ELEMENT_WISE, assert_equal_optimizers, local, set_gradients, tensors_of
from optimizers.steps import pair, plain_copies, sharded, take_steps

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# Of the sharded parameter, of the computation, and then of gradient and states.
TABLE = [
    (FP32, None, FP32),
    (FP32, BF16, FP32),
    (FP32, FP16, FP32),
    (BF16, None, BF16),
    (BF16, BF16, BF16),
    (FP16, None, FP16),
]


@behaviour(1, 2, reports=["areal-project/AReaL#1292"], each=[{"row": row} for row in range(len(TABLE))])
def states_have_the_dtype_of_the_sharded_parameter(row: int) -> None:
    """With one warning per optimizer where that is too little for Adam."""
    sharded_dtype, param_dtype, expected = TABLE[row]
    model = wrap(mlp().to(sharded_dtype), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    optimizer = optim.AdamW(model.parameters())
    texts: list[str] = []
    for _ in range(3):
        loss_of(model, batch().to(sharded_dtype)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer_step(optimizer)
        texts += [str(warning.message) for warning in caught]
        assert all(parameter.grad.dtype == expected for parameter in model.parameters())
        zero_grad(optimizer)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert parameter.dtype == sharded_dtype
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected
        assert state["step"].dtype == FP32
    assert len(texts) == (expected != FP32)
    if texts:
        assert f"AdamW keeps its states in {expected}" in texts[0]
        assert "Keep the parameters in float32" in texts[0]


@behaviour(1, reports=["areal-project/AReaL#1292"])
def low_precision_without_adam_does_not_warn() -> None:
    model = wrap(mlp().to(BF16))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, batch().to(BF16)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_step(optimizer)


@behaviour(2, reports=["areal-project/AReaL#1292"])
def bfloat16_states_learn_less() -> None:
    """What the warning is about: a sum of small squares stands still in bfloat16."""
    model = {dtype: wrap(mlp().to(dtype)) for dtype in (FP32, BF16)}
    averages = {}
    for dtype, net in model.items():
        optimizer = optim.AdamW(net.parameters(), lr=0.0)
        for _ in range(300):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer_step(optimizer)
        first = next(net.parameters())
        averages[dtype] = whole(optimizer.state[first]["exp_avg_sq"]).float().mean().item()
    assert averages[FP32] == pytest.approx(1 - 0.999**300, rel=1e-3)
    assert abs(averages[BF16] - averages[FP32]) > 0.05 * averages[FP32]


@behaviour(2)
def main_gradients_are_stepped_with() -> None:
    """Rounded to the parameter's dtype, as the reduction would have rounded them."""
    results = []
    for keeps in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, apply_grad_on_fp32_main_grad=keeps)
        model = wrap(mlp().to(BF16), mp_policy=policy)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, batch(step=step).to(BF16)).backward()
            assert all((parameter.grad is None) == keeps for parameter in model.parameters())
            optimizer_step(optimizer)
            assert all((parameter.grad is None) == keeps for parameter in model.parameters())
            zero_grad(optimizer)
        results.append(dict(tensors_of(optimizer)))
    assert_same_bits(
        {name: local(value) for name, value in results[1].items()},
        {name: local(value) for name, value in results[0].items()},
    )


@behaviour(1)
def main_gradients_of_plain_parameters_are_stepped_with() -> None:
    parameter, truth = torch.nn.Parameter(torch.ones(4, dtype=BF16)), torch.nn.Parameter(torch.ones(4, dtype=BF16))
    ours, theirs = optim.SGD([parameter], lr=0.3, momentum=0.9), optim.SGD([truth], lr=0.3, momentum=0.9)
    for step in range(3):
        parameter.main_grad = torch.full((4,), 0.1 + step)
        truth.grad = parameter.main_grad.to(BF16)
        optimizer_step(ours)
        theirs.step()
        assert parameter.grad is None
        assert parameter.main_grad.dtype == FP32
        assert torch.equal(parameter, truth)
        assert torch.equal(ours.state[parameter]["momentum_buffer"], theirs.state[truth]["momentum_buffer"])


@behaviour(1, 2, each=[{"name": name} for name in ELEMENT_WISE])
def states_are_made_without_a_step(name: str) -> None:
    """Those that a first step would make, before it has changed them; the parameters stay."""
    kind, options = ELEMENT_WISE[name]
    made, _ = pair(kind, dtype=FP32, **options)
    before = [local(parameter).clone() for parameter in made.param_groups[0]["params"]]
    init_state(made)
    for parameter, value in zip(made.param_groups[0]["params"], before, strict=True):
        assert torch.equal(local(parameter), value)
        assert parameter.grad is None
        assert local(parameter).grad is None
        assert all(state == 0 for key, state in made.state[parameter].items() if key == "step")
    stepped, _ = pair(kind, dtype=FP32, **options)
    for optimizer in (made, stepped):
        for step in range(2):
            set_gradients(optimizer.param_groups[0]["params"], step=step)
            optimizer_step(optimizer)
    assert_equal_optimizers(made, stepped)


@behaviour(2)
def only_missing_states_are_made() -> None:
    ours, theirs = pair(optim.AdamW, dtype=FP32)
    take_steps(ours, theirs, steps=range(2), without={0: (1,), 1: (1,)})
    kept = {id(value) for state in ours.state.values() for value in state.values()}
    init_state(ours)
    second = ours.param_groups[0]["params"][1]
    new = {id(value) for state in ours.state.values() for value in state.values()} - kept
    assert new == {id(value) for value in ours.state[second].values()}
    with pytest.raises(NotImplementedError, match="expected one of torch's element-wise optimizers, but got LBFGS"):
        init_state(optim.LBFGS([torch.nn.Parameter(torch.ones(1))]))


@behaviour(
    2,
    reports=["huggingface/accelerate#4289", "databricks/flashoptim#3"],
    each=[{"full": full} for full in (False, True)],
)
def checkpoints_round_trip(full: bool) -> None:
    """Through torch's `state_dict` functions, into an optimizer whose states were made without a step."""
    options = StateDictOptions(full_state_dict=full)
    model = sharded("hpcompat", dtype=FP32)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        set_gradients(model.parameters(), step=step)
        optimizer_step(optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other_model = sharded("hpcompat", dtype=FP32)
    other = optim.AdamW(other_model.parameters(), lr=0.1)
    init_state(other)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, saved, options=options)
    for net, stepped in ((model, optimizer), (other_model, other)):
        for step in range(3, 6):
            set_gradients(net.parameters(), step=step)
            optimizer_step(stepped)
    assert assert_equal_optimizers(other, optimizer) > 0


@behaviour(2)
def states_in_other_placements_are_refused() -> None:
    ours, theirs = pair(optim.AdamW, dtype=FP32)
    take_steps(ours, theirs, steps=range(2))
    first = ours.param_groups[0]["params"][0]
    ours.state[first]["exp_avg"] = ours.state[first]["exp_avg"].redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match="expected state 'exp_avg' on the mesh and with the placements"):
        optimizer_step(ours)


CONSTRUCTORS: dict[str, tuple[Any, type[Any], dict[str, Any]]] = {
    "AdamW": (AdamW, optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "Adam": (Adam, optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
    "SGD": (SGD, optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@behaviour(2, each=[{"name": name, "dtype": dtype} for name in CONSTRUCTORS for dtype in (FP32, BF16)])
def constructors_take_the_multi_tensor_kernels(name: str, dtype: torch.dtype) -> None:
    """On the CPU too: the bits of torch's with `foreach=True`, over DTensors and over plain tensors."""
    constructor, kind, options = CONSTRUCTORS[name]
    ours = constructor(sharded("hpcompat", dtype=dtype).parameters(), **options)
    assert type(ours) is kind
    _, theirs = pair(kind, dtype=dtype, foreach=True, **options)
    plain = plain_copies(theirs, kind, foreach=True, **options)
    take_steps(ours, theirs, steps=range(4))
    for step in range(4):
        set_gradients(plain.param_groups[0]["params"], step=step)
        plain.step()
    assert assert_equal_optimizers(ours, theirs) > 0
    for (key, mine), (_, other) in zip(tensors_of(ours), tensors_of(plain), strict=True):
        assert torch.equal(local(mine), other), key


@behaviour(1)
def constructors_take_what_torch_takes() -> None:
    model = sharded("hpcompat", dtype=FP32)
    named = list(model.named_parameters())
    parameters = [parameter for _, parameter in named]
    assert AdamW(model.parameters()).param_groups[0]["params"] == parameters
    assert AdamW(iter(named)).param_groups[0]["param_names"] == [name for name, _ in named]
    groups = AdamW([{"params": iter(parameters[:2]), "lr": 1.0}, {"params": parameters[2]}], lr=2.0).param_groups
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 1.0), (1, 2.0)]
    assert Adam(parameters).defaults == {**optim.Adam(parameters).defaults, "foreach": True}
    assert SGD(parameters).defaults == {**optim.SGD(parameters).defaults, "foreach": True}
    assert AdamW(parameters).defaults == {**optim.AdamW(parameters).defaults, "foreach": True}
    for option in ({"foreach": False}, {"fused": True}, {"differentiable": True}, {"lr": torch.tensor(0.1)}):
        given = AdamW(parameters, **option).defaults
        assert given["foreach"] is (False if option == {"foreach": False} else None)
