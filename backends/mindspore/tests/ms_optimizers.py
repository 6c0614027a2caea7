"""What the ranks run: steps of our optimizers and of MindSpore's on shards, and their states."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental import optim as experimental

import hpcompat
from hpcompat import CapabilityError, MixedPrecisionPolicy
from hpcompat import optim as front
from hpcompat_mindspore import autograd, optim
from hpcompat_mindspore.param import full_tensor, param_of
from ms_layouts import bits, give_gradients, laid_out, random_gradients, same_bits, unwrapped
from ms_models import Net, batch, initialize, loss_of, named
from ms_truth import assert_close, full_gradients, full_values, rank, train, true_gradients, wrap

Array = np.ndarray[Any, Any]


def _optimizer(kind: str, model: Any, **options: Any) -> Any:
    return getattr(optim, kind)(list(named(model).values()), **options)


# Steps


def steps_on_shards(kind: str, layout: str, *, dtype: str = "float32", hidden: int = 10, **options: Any) -> None:
    """To the bit what the same optimizer does to whole parameters; and the shards stay where they are."""
    model, truth = laid_out(layout, dtype=dtype, hidden=hidden), unwrapped(dtype=dtype, hidden=hidden)
    optimizers = [_optimizer(kind, cell, **options) for cell in (model, truth)]
    managed = [param for parameter in named(model).values() if (param := param_of(parameter)) is not None]
    addresses = [param.parameter.data_ptr() for param in managed]
    for step in range(3):
        for cell, one in zip((model, truth), optimizers, strict=True):
            give_gradients(cell, random_gradients(cell, step=step))
            one.param_groups[0]["lr"] = 0.01 / (step + 1)
            optim.step(one)
    assert [param.parameter.data_ptr() for param in managed] == addresses
    assert not any(param.is_elsewhere for param in managed)
    for param in managed:
        assert param.parameter.size == 0 or np.shares_memory(param.parameter.asnumpy(), param.shard_data), param.name
    assert same_bits(full_values(model), full_values(truth)) == []
    assert len(same_bits(full_values(truth), full_values(unwrapped(dtype=dtype, hidden=hidden)))) == len(named(truth))
    for (name, parameter), other in zip(named(model).items(), named(truth).values(), strict=True):
        state, expected = optimizers[0].state[parameter], optimizers[1].state[other]
        assert state.keys() == expected.keys()
        for key in (key for key in state if key != "step"):  # in one order on all ranks
            assert state[key].dtype == parameter.dtype
            whole = full_tensor(parameter, state[key])
            assert np.array_equal(bits(whole), bits(expected[key])), (name, key)
        if "step" in state:
            assert state["step"].dtype == mindspore.float32
            assert float(state["step"].asnumpy()) == 3.0


def forward_sees_the_step(layout: str) -> None:
    """The gather takes the memory that the step wrote to."""
    model, truth = laid_out(layout), unwrapped()
    train(model)
    give_gradients(model, random_gradients(model, step=0))
    give_gradients(truth, random_gradients(truth, step=0))
    for cell in (model, truth):
        optim.step(_optimizer("AdamW", cell, lr=0.1))
    data = batch(rank(), step=1)
    np.testing.assert_allclose(model(data[0]).asnumpy(), truth(data[0]).asnumpy(), rtol=1e-5, atol=1e-6)


def trains(style: str) -> None:
    """Losses of whole training steps against one process, in both ways of training."""
    model, truth = wrap(initialize(Net())), initialize(Net())
    ours, theirs = (_optimizer("AdamW", cell, lr=0.05) for cell in (model, truth))
    weights = list(named(model).values())
    run = autograd.value_and_grad(lambda *data: loss_of(model, data), weights)
    for step in range(5):
        expected = true_gradients(truth, steps=(step,))
        if style == "backward":
            loss = train(model, step=step)
            optim.step(ours)
        elif style == "closure":
            loss = optim.step(ours, lambda step=step: train(model, step=step))
        else:
            value, grads = run(*batch(rank(), step=step))
            loss = float(value.asnumpy())
            ours(grads)
        true_loss = float(loss_of(truth, batch(rank(), step=step)).asnumpy())
        assert abs(loss - true_loss) <= 1e-5 * abs(true_loss), (step, loss, true_loss)
        theirs([Tensor(expected[name]) for name in named(truth)])
        optim.zero_grad(ours)
    assert_close(full_values(model), full_values(truth), tolerance=1e-4)


def steps_while_unsharded() -> None:
    """An unsharded parameter shows the whole; its shard is what changes."""
    model, truth = laid_out("sharded"), laid_out("sharded")
    for cell in (model, truth):
        give_gradients(cell, random_gradients(cell, step=0))
    model.layers[0].unshard()
    for cell in (model, truth):
        optim.step(_optimizer("SGD", cell, lr=0.1))
    model.layers[0].reshard()
    assert same_bits(full_values(model), full_values(truth)) == []
    assert len(same_bits(full_values(truth), full_values(unwrapped()))) == len(named(truth))


def groups_and_dtypes() -> None:
    """Groups with options of their own, parameters of several dtypes, some of them without a gradient."""
    model, truth = (hpcompat.fully_shard(unwrapped(half_head=True)), unwrapped(half_head=True))
    optimizers = []
    for cell in (model, truth):
        members = list(named(cell).values())
        groups = [{"params": members[::2], "lr": 0.1, "weight_decay": 0.0}, {"params": members[1::2], "amsgrad": True}]
        optimizers.append(optim.AdamW(groups, lr=0.01, maximize=True))
        assert [group["lr"] for group in optimizers[-1].param_groups] == [0.1, 0.01]
    absent = {list(named(model))[3]}
    for step in range(2):
        for cell, one in zip((model, truth), optimizers, strict=True):
            give_gradients(cell, random_gradients(cell, step=step), absent=absent)
            one.step()
    assert same_bits(full_values(model), full_values(truth)) == []
    before = full_values(unwrapped(half_head=True))
    for name, value in full_values(model).items():
        assert np.array_equal(bits(value), bits(before[name])) == (name in absent), name
    assert not optimizers[0].state[named(model)[absent.pop()]]


def main_grad() -> None:
    """A gradient kept in the reduce dtype is rounded to the parameter's."""
    policy = MixedPrecisionPolicy(
        param_dtype=mindspore.float16, reduce_dtype=mindspore.float32, apply_grad_on_fp32_main_grad=True
    )
    model = wrap(initialize(Net()), mp_policy=policy)
    ours = _optimizer("SGD", model, lr=1.0)
    train(model)
    grads = {name: full_tensor(p, p.main_grad).asnumpy().copy() for name, p in named(model).items()}
    assert all(parameter.grad is None for parameter in named(model).values())
    optim.step(ours)
    expected = {name: value - grads[name] for name, value in full_values(initialize(Net())).items()}
    assert same_bits(full_values(model), expected) == []
    optim.zero_grad(ours)
    assert all(parameter.main_grad is None for parameter in named(model).values())


# States


def state_round_trip(kind: str, layout: str, **options: Any) -> None:
    """Saved and loaded, an optimizer goes on with the same bits; whole values are cut."""
    models = [laid_out(layout) for _ in range(3)]
    first, second, third = (_optimizer(kind, cell, **options) for cell in models)

    def go(cell: Any, one: Any, *, steps: range) -> None:
        for step in steps:
            give_gradients(cell, random_gradients(cell, step=step))
            one.step()

    go(models[0], first, steps=range(2))
    first.param_groups[0]["lr"] = 0.02
    saved = first.state_dict()
    numbered = list(range(len(named(models[0]))))
    assert saved["param_groups"][0]["params"] == numbered
    assert sorted(saved["state"]) == numbered
    parameters = list(named(models[0]).values())
    whole = {
        "param_groups": saved["param_groups"],
        "state": {
            index: {
                key: value if key == "step" else full_tensor(parameters[index], value).asnumpy()
                for key, value in state.items()
            }
            for index, state in saved["state"].items()
        },
    }
    for cell, one, values in ((models[1], second, saved), (models[2], third, whole)):
        go(cell, _optimizer(kind, cell, **options), steps=range(2))
        one.load_state_dict(values)
        assert one.param_groups[0]["lr"] == 0.02
    for cell, one in zip(models, (first, second, third), strict=True):
        go(cell, one, steps=range(2, 4))
    for cell in models[1:]:
        assert same_bits(full_values(cell), full_values(models[0])) == []
    with pytest.raises(ValueError, match=r"exp_avg|momentum_buffer"):
        second.load_state_dict({**saved, "state": {0: {first.shaped_states[0]: Tensor(np.zeros(77, np.float32))}}})
    with pytest.raises(ValueError, match="groups"):
        second.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})


def states_without_a_step() -> None:
    """They appear at the first step, or when asked for; neither moves a parameter that has no gradient."""
    model = laid_out("sharded", dtype="bfloat16", hidden=3)
    before = {name: bits(parameter) for name, parameter in named(model).items()}
    ours = _optimizer("AdamW", model, amsgrad=True)
    assert ours.state_dict()["state"] == {}
    ours.step()
    assert ours.state_dict()["state"] == {}
    ours.init_state()
    for name, parameter in named(model).items():
        state = ours.state[parameter]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert float(state["step"].asnumpy()) == 0.0
        for key in state.keys() - {"step"}:
            assert (state[key].dtype, state[key].shape) == (mindspore.bfloat16, parameter.shape)
        assert np.array_equal(bits(parameter), before[name])


def dtypes_of_states() -> None:
    """The parameter's; one warning where that is bfloat16."""
    for dtype, num_warnings in (("float32", 0), ("float16", 0), ("bfloat16", 1)):
        model = unwrapped(dtype=dtype)
        handler = mock.Mock(level=logging.WARNING)
        logger = logging.getLogger("hpcompat")
        logger.addHandler(handler)
        try:
            ours = _optimizer("Adam", model)
            for step in range(2):
                give_gradients(model, random_gradients(model, step=step))
                ours.step()
        finally:
            logger.removeHandler(handler)
        messages = [call.args[0].getMessage() for call in handler.handle.call_args_list]
        assert len(messages) == num_warnings, messages
        assert all("bfloat16" in message for message in messages)
        for parameter, state in ours.state.items():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.dtype
            assert state["step"].dtype == mindspore.float32


# Dropping gradients


def zero_grad(target: str, kind: str) -> None:
    """What is pending goes too: the next backward's gradients are its own alone."""
    main = MixedPrecisionPolicy(reduce_dtype=mindspore.float32, apply_grad_on_fp32_main_grad=True)
    shape = (2, 1) if kind == "partial" else (2,)
    from ms_truth import mesh_of

    model = wrap(initialize(Net()), mesh=mesh_of(shape), **({"mp_policy": main} if kind == "main grad" else {}))
    ours = _optimizer("SGD", model)
    if kind == "without sync":
        model.set_requires_gradient_sync(False)
    if kind == "partial":
        model.set_requires_all_reduce(False)
    train(model, step=5)
    optim.zero_grad(model if target == "cell" else ours)
    assert all(parameter.grad is None for parameter in named(model).values())
    model.set_requires_gradient_sync(True)
    train(model, step=0)
    if kind == "main grad":
        for parameter in named(model).values():
            parameter.grad = parameter.main_grad
    assert_close(full_gradients(model), true_gradients(initialize(Net())))


# MindSpore's own optimizers


def _groups(members: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": members[:2], "lr": 0.01, "weight_decay": 0.1}, {"params": members[2:], "lr": 0.05}]


def foreign(kind: str, layout: str, *, hidden: int = 10) -> None:
    """On shards what they do to whole parameters; a parameter without a gradient gets zeros."""
    make: dict[str, Any] = {
        "SGD": lambda members: nn.SGD(members, learning_rate=0.05, momentum=0.9),
        "Momentum": lambda members: nn.Momentum(members, learning_rate=0.05, momentum=0.9),
        "Adam": lambda members: nn.Adam(members, learning_rate=0.05),
        "Adam in groups": lambda members: nn.Adam(_groups(members), learning_rate=0.05),
        "ASGD": lambda members: nn.ASGD(members, learning_rate=0.05),
        "experimental AdamW": lambda members: experimental.AdamW(members, lr=0.05),
    }
    model, truth = laid_out(layout, hidden=hidden), unwrapped(hidden=hidden)
    optimizers = [make[kind](list(named(cell).values())) for cell in (model, truth)]
    for step in range(3):
        for cell, one in zip((model, truth), optimizers, strict=True):
            give_gradients(cell, random_gradients(cell, step=step))
            assert optim.is_optimizer(one)
            optim.step(one)
            optim.zero_grad(one)
    assert_close(full_values(model), full_values(truth))
    optim.step(optimizers[0])


def foreign_refusals() -> None:
    model = unwrapped()
    give_gradients(model, random_gradients(model, step=0))
    members = list(named(model).values())
    for kind in ("Adam", "AdamW", "SGD"):
        with pytest.raises(CapabilityError, match=rf"mint\.optim\.{kind} on the CPU"):
            optim.step(getattr(mint.optim, kind)(members, lr=0.1))
    low = unwrapped(dtype="bfloat16")
    give_gradients(low, random_gradients(low, step=0))
    with pytest.raises(CapabilityError, match="Adam of BFloat16 on the CPU"):
        optim.step(nn.Adam(list(named(low).values())))
    early = nn.Adam(members)
    wrap(model)
    give_gradients(model, random_gradients(model, step=0))
    with pytest.raises(RuntimeError, match="create Adam after wrapping"):
        optim.step(early)
    rows = nn.AdaFactor(members, learning_rate=0.1, relative_step=False, scale_parameter=False)
    with pytest.raises(RuntimeError, match="AdaFactor does not update element by element"):
        optim.step(rows)
    with pytest.raises(CapabilityError, match=r"MindSpore said: Unsupported op \[Lamb\]"):
        optim.step(nn.Lamb(members, learning_rate=0.1))
    late = nn.Adam(members)
    model.layers[0].unshard()
    with pytest.raises(RuntimeError, match="unsharded"):
        optim.step(late)
    with pytest.raises(TypeError, match="expected an optimizer"):
        optim.step(model)
    assert not optim.is_optimizer(model)


def neutral_calls() -> None:
    """The front finds this room, by module, by parameter and by optimizer."""
    model, truth = laid_out("mixed"), unwrapped()
    for cell in (model, truth):
        give_gradients(cell, random_gradients(cell, step=0))
    norms = [float(front.clip_grad_norm_(cell, 1.0).asnumpy()) for cell in (model, truth)]
    assert norms[0] == norms[1] > 1.0
    for cell in (model, truth):
        ours = front.AdamW(hpcompat.parameters(cell), lr=0.1)
        assert isinstance(ours, optim.AdamW)
        assert front.optimizer_step(ours, lambda: 7.0) == 7.0
        front.zero_grad(ours)
        assert all(autograd.get_gradient(parameter) is None for parameter in named(cell).values())
        give_gradients(cell, random_gradients(cell, step=0))
        front.zero_grad(cell)
        assert all(autograd.get_gradient(parameter) is None for parameter in named(cell).values())
    assert same_bits(full_values(model), full_values(truth)) == []
    with pytest.raises(CapabilityError, match="set_to_none"):
        front.zero_grad(model, set_to_none=False)
    give_gradients(truth, random_gradients(truth, step=0))
    front.optimizer_step(nn.SGD(list(named(truth).values()), learning_rate=0.1))


def named_parameters() -> None:
    model = unwrapped()
    ours = optim.SGD(list(named(model).items()), lr=0.1, momentum=0.9)
    assert ours.parameters == tuple(named(model).values())
    assert ours.state_dict()["param_groups"][0]["param_names"] == list(named(model))
    with pytest.raises(TypeError, match="name all of them"):
        optim.SGD([model.head.weight, ("bias", model.head.bias)])
    with pytest.raises(ValueError, match="of all groups or of none"):
        ours.add_param_group({"params": unwrapped().head.weight})


def float64() -> None:
    """Works, though torch's bits are not promised."""
    parameter = Parameter(Tensor(np.ones(3)), name="weight")
    parameter._grad = Tensor(np.array([1.0, -1.0, 0.0]))
    ours = optim.AdamW([parameter], lr=0.1, weight_decay=0.0)
    ours.step()
    np.testing.assert_allclose(parameter.asnumpy(), [0.9, 1.1, 1.0], rtol=1e-7)
    assert ours.state[parameter]["exp_avg"].dtype == mindspore.float64


def mistakes() -> None:
    members = list(named(unwrapped()).values())
    integer = Parameter(Tensor(np.zeros(2, np.int32)), name="integer", requires_grad=False)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "but got none", lambda: optim.AdamW([])),
        (TypeError, "pass a list", lambda: optim.AdamW(members[0])),
        (TypeError, "expected parameters", lambda: optim.AdamW([members[0], "weight"])),
        (TypeError, "floating", lambda: optim.SGD([integer])),
        (ValueError, "one group", lambda: optim.AdamW([{"params": members[:2]}, {"params": members[1:3]}])),
        (ValueError, "lr", lambda: optim.Adam(members, lr=-1.0)),
        (ValueError, r"betas\[1\]", lambda: optim.Adam(members, betas=(0.9, 1.0))),
        (ValueError, "nesterov", lambda: optim.SGD(members, nesterov=True)),
        (CapabilityError, "fused", lambda: optim.AdamW(members, fused=True)),
        (CapabilityError, "capturable", lambda: optim.Adam(members, capturable=True)),
        (TypeError, "an order that is the same on all ranks", lambda: optim.SGD([{"params": set(members)}])),
        (ValueError, "one gradient per parameter", lambda: optim.SGD(members)([])),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    members[0].grad = Tensor(np.zeros(77, np.float32))
    with pytest.raises(ValueError, match="the shard's shape"):
        optim.SGD(members).step()
    model = unwrapped()
    ours = _optimizer("AdamW", model)
    give_gradients(model, random_gradients(model, step=0))
    ours.step()
    wrap(model)
    if hpcompat.get_world_size() > 1:
        give_gradients(model, random_gradients(model, step=1))
        with pytest.raises(ValueError, match="create the optimizer anew"):
            ours.step()
