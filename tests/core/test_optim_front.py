"""The neutral front of optimizers: what it refuses, what it hands to which backend, and in what form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from hpcompat import optim, registry
from hpcompat.errors import CapabilityError


class Parameter:
    """Iterable, as tensors are."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


class Module:
    """Iterable, as containers of modules are; its first parameter is in two places."""

    def __init__(self) -> None:
        self.parameters = [Parameter(), Parameter()]

    def __iter__(self) -> Iterator[int]:
        return iter((3, 4))


class Optimizer:
    pass


class Mesh:
    pass


class Room:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("scaled_step", "unscale_grads_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, args, kwargs))
            return f"result of {name}"

        return call

    def is_optimizer(self, value: object) -> bool:
        return isinstance(value, Optimizer)


class Fake:
    """A backend of the classes above."""

    name = "fake"

    def __init__(self) -> None:
        self.optim = Room()

    def owns(self, value: object) -> bool:
        return isinstance(value, Parameter | Module | Optimizer | Mesh)

    def is_module(self, value: object) -> bool:
        return isinstance(value, Module)

    def is_mesh(self, value: object) -> bool:
        return isinstance(value, Mesh)

    def is_parameter(self, value: object) -> bool:
        return isinstance(value, Parameter)

    def named_parameters(self, module: Module, *, recurse: bool) -> Iterator[tuple[str, Parameter]]:
        assert recurse
        first, second = module.parameters
        yield from (("a", first), ("b", second), ("again", first))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The only backend there is, with its framework imported."""
    backend = Fake()
    monkeypatch.delenv(registry.ENV_VAR, raising=False)
    monkeypatch.setattr(registry, "_imported", lambda: ["fake"])
    monkeypatch.setattr(registry, "_declared", lambda: {"fake": None})
    monkeypatch.setattr(registry, "_instance", lambda name: backend)
    monkeypatch.setattr(registry, "_default", None)
    return backend


# Steps


def test_step_goes_to_the_backend_of_the_optimizer(fake: Fake) -> None:
    optimizer = Optimizer()
    assert optim.optimizer_step(optimizer) == "result of step"
    assert optim.optimizer_step(optimizer, closure=max) == "result of step"
    assert fake.optim.calls == [("step", (optimizer, None), {}), ("step", (optimizer, max), {})]


def test_listeners_hear_of_a_step_before_and_after_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, object, int]] = []
    monkeypatch.setattr(
        optim, "listeners", [lambda phase, optimizer: heard.append((phase, optimizer, len(fake.optim.calls)))]
    )
    optimizer = Optimizer()
    assert optim.optimizer_step(optimizer) == "result of step"
    assert heard == [("before_optim", optimizer, 0), ("after_optim", optimizer, 1)]
    with pytest.raises(TypeError, match="closure to be callable"):
        optim.optimizer_step(optimizer, 5)  # type: ignore[arg-type]
    assert len(heard) == 2


@pytest.mark.parametrize("value", [Parameter(), Module(), Mesh()])
def test_step_wants_an_optimizer(fake: Fake, value: object) -> None:
    with pytest.raises(TypeError, match=rf"optimizer_step expects an optimizer, but got {type(value).__name__}"):
        optim.optimizer_step(value)
    assert fake.optim.calls == []


def test_step_wants_an_object_of_a_framework(fake: Fake) -> None:
    with pytest.raises(TypeError, match="expected an object of an installed backend's framework, but got"):
        optim.optimizer_step(5)


def test_step_wants_a_closure_that_can_be_called(fake: Fake) -> None:
    with pytest.raises(TypeError, match="optimizer_step expects closure to be callable, but got 5"):
        optim.optimizer_step(Optimizer(), 5)  # type: ignore[arg-type]
    assert fake.optim.calls == []


def test_step_takes_a_closure_or_a_scaler(fake: Fake) -> None:
    with pytest.raises(ValueError, match="optimizer_step expects closure or scaler, but got both"):
        optim.optimizer_step(Optimizer(), max, scaler="a scaler")


def test_a_backend_may_lack_scalers(fake: Fake) -> None:
    for call in (lambda: optim.optimizer_step(Optimizer(), scaler=1), lambda: optim.unscale_grads_(Optimizer(), 1)):
        with pytest.raises(CapabilityError, match="backend 'fake' lacks the capability 'loss scaling'"):
            call()


def test_scalers_go_to_a_backend_that_has_them(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(fake.optim, "scaled_step", lambda *args: seen.append(args), raising=False)
    monkeypatch.setattr(fake.optim, "unscale_grads_", lambda *args: seen.append(args), raising=False)
    optimizer = Optimizer()
    optim.unscale_grads_(optimizer, "scaler")
    optim.optimizer_step(optimizer, scaler="scaler")
    assert seen == [(optimizer, "scaler")] * 2
    assert fake.optim.calls == []


# Clipping


def test_clipping_takes_anything_with_parameters(fake: Fake) -> None:
    """Each once, in order; neither a parameter nor a module is taken for a collection."""
    module = Module()
    first, second = module.parameters
    for parameters, expected in (
        (module, [first, second]),
        (first, [first]),
        ([second, first, second], [second, first]),
        ((first,), [first]),
        (iter([first, second]), [first, second]),
        ({"x": first}.values(), [first]),
    ):
        assert optim.clip_grad_norm_(parameters, 1) == "result of clip_grad_norm_"
        name, (members, limit), options = fake.optim.calls.pop()
        assert name == "clip_grad_norm_"
        assert members == expected
        assert (limit, options) == (1.0, {"norm_type": 2.0, "error_if_nonfinite": False})


def test_clipping_has_torchs_signature(fake: Fake) -> None:
    optim.clip_grad_norm_([Parameter()], 2, "inf", True, None)
    _, (_, limit), options = fake.optim.calls.pop()
    assert (limit, options) == (2.0, {"norm_type": math.inf, "error_if_nonfinite": True})
    optim.clip_grad_norm_(parameters=[Parameter()], max_norm=1, norm_type=1, error_if_nonfinite=False, foreach=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_norm": "much"}, TypeError, "clip_grad_norm_ expects max_norm to be a number, but got 'much'"),
        ({"max_norm": None}, TypeError, "clip_grad_norm_ expects max_norm to be a number, but got None"),
        ({"norm_type": "l2"}, TypeError, "clip_grad_norm_ expects norm_type to be a number, but got 'l2'"),
        ({"norm_type": math.nan}, ValueError, "clip_grad_norm_ expects norm_type to be a number, but got nan"),
        ({"parameters": [Parameter(), 5]}, TypeError, "clip_grad_norm_ expects parameters of fake, but got 5"),
        ({"parameters": [Module()]}, TypeError, "clip_grad_norm_ expects parameters of fake, but got"),
        ({"parameters": [Mesh()]}, TypeError, "clip_grad_norm_ expects parameters of fake, but got"),
        ({"parameters": Optimizer()}, TypeError, "clip_grad_norm_ expects parameters of fake, but got"),
        ({"parameters": 5}, TypeError, "expected an object of an installed backend's framework"),
        ({"parameters": "model"}, TypeError, "expected an object of an installed backend's framework"),
    ],
)
def test_clipping_refuses(fake: Fake, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optim.clip_grad_norm_(**{"parameters": [Parameter()], "max_norm": 1.0, **arguments})
    assert fake.optim.calls == []


def test_clipping_nothing_is_told_where_it_is_a_mistake(fake: Fake) -> None:
    """A generator that was used up; an empty list may be meant."""
    with pytest.warns(UserWarning, match="an iterator with nothing left"):
        optim.clip_grad_norm_(iter(()), 1.0)
    optim.clip_grad_norm_([], 1.0)
    assert [members for _, (members, _), _ in fake.optim.calls] == [[], []]


# Zeroing


def test_zeroing_goes_to_the_backend(fake: Fake) -> None:
    module, optimizer = Module(), Optimizer()
    optim.zero_grad(module)
    optim.zero_grad(optimizer, True)
    optim.zero_grad(optimizer, set_to_none=False)
    assert fake.optim.calls == [
        ("zero_grad", (module,), {}),
        ("zero_grad", (optimizer,), {}),
        ("zero_grad", (optimizer,), {"set_to_none": False}),
    ]


@pytest.mark.parametrize("value", [Parameter(), Mesh()])
def test_zeroing_wants_a_module_or_an_optimizer(fake: Fake, value: object) -> None:
    with pytest.raises(TypeError, match=rf"zero_grad expects a module or an optimizer, but got {type(value).__name__}"):
        optim.zero_grad(value)


# Constructors

DEFAULTS = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False},
    "SGD": {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_constructors_go_to_the_framework_of_the_parameters(fake: Fake, name: str) -> None:
    first, second = Parameter(), Parameter()
    make = getattr(optim, name)
    assert make([first, second]) == f"result of {name}"
    assert fake.optim.calls.pop() == (name, ([first, second],), DEFAULTS[name])
    make(iter([first, second]), 0.5, maximize=True)
    assert fake.optim.calls.pop() == (name, ([first, second],), {**DEFAULTS[name], "lr": 0.5, "maximize": True})
    make(iter([("a", first), ("b", second)]))
    assert fake.optim.calls.pop() == (name, ([("a", first), ("b", second)],), DEFAULTS[name])


def test_groups_may_hold_iterators_and_single_parameters(fake: Fake) -> None:
    first, second, third = Parameter(), Parameter(), Parameter()
    groups = [{"params": iter([first]), "lr": 0.1}, {"params": second}, {"params": [("c", third)]}]
    optim.AdamW(groups)
    _, (given,), _ = fake.optim.calls.pop()
    assert given == [{"params": [first], "lr": 0.1}, {"params": second}, {"params": [("c", third)]}]


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "expects parameters to optimize, but got none"),
        (iter(()), ValueError, r"a generator such as model.parameters\(\) gives them only once"),
        ([{"params": []}], ValueError, "expects parameters to optimize, but got none"),
        (5, TypeError, "expects an iterable of parameters or of groups, but got 5"),
        ("model", TypeError, "expects an iterable of parameters or of groups, but got 'model'"),
        ({"params": []}, TypeError, "expects an iterable of parameters or of groups, but got"),
        ([{"lr": 1}], TypeError, r'expects groups with "params", but got one with \[\'lr\'\]'),
        ([5], TypeError, "expected an object of an installed backend's framework"),
    ],
)
def test_constructors_refuse(fake: Fake, name: str, params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(optim, name)(params)
    assert fake.optim.calls == []
