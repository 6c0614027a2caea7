"""Parameters of other libraries: anything that keeps its local part in `_local_tensor` or gives it by `to_local()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from behaviour.registry import behaviour
from hpcompat.optim import optimizer_step
from optimizers.cases import ELEMENT_WISE, random_gradient
from parity.bits import bits


class Kept(Tensor):
    """A distributed tensor of another kind: shares the memory of its local part, and has that one's gradient."""

    _local_tensor: Tensor
    device_mesh = "a mesh"
    placements = ("a placement",)

    @staticmethod
    def __new__(cls, local: Tensor) -> Kept:
        made = Tensor._make_subclass(cls, local, local.requires_grad)
        made._local_tensor = local
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not getattr(func, "__name__", "").startswith(("__get__", "__set__")):
            raise RuntimeError(f"expected no operation on distributed tensors, but got {func}")
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._local_tensor.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._local_tensor.grad = value


class Wrapping(Kept):
    """States come back as distributed tensors where there is a way."""

    @staticmethod
    def from_local(local: Tensor, mesh: str, placements: tuple[str, ...]) -> Wrapping:
        assert (mesh, placements) == ("a mesh", ("a placement",))
        return Wrapping(local)


class Given(Kept):
    """Its local part only by `to_local()`."""

    @staticmethod
    def __new__(cls, local: Tensor) -> Given:
        made = Tensor._make_subclass(cls, local, local.requires_grad)
        made.hidden = local
        return made

    def to_local(self) -> Tensor:
        return self.hidden

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self.hidden.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.hidden.grad = value


KINDS: dict[str, type[Kept]] = {"kept": Kept, "wrapping": Wrapping, "given": Given}


def local_part(value: Any) -> Any:
    if isinstance(value, Given):
        return value.hidden
    return value._local_tensor if isinstance(value, Kept) else value


@behaviour(
    1,
    each=[
        {"kind": kind, "name": name, "dtype": dtype}
        for kind in KINDS
        for name in ("AdamW", "SGD momentum", "NAdam")
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def parameters_of_other_libraries_step_as_plain_ones(kind: str, name: str, dtype: torch.dtype) -> None:
    """To the bit, beside plain ones, with the gradients left where they are."""
    optimizer_class, options = ELEMENT_WISE[name]
    torch.manual_seed(3)
    values = [torch.randn(5, 3).to(dtype), torch.randn(70).to(dtype), torch.randn(0, 2).to(dtype)]
    locals_ = [value.clone().requires_grad_() for value in values]
    parameters: list[Any] = [*(KINDS[kind](value) for value in locals_[:2]), nn.Parameter(values[2].clone())]
    plain = [nn.Parameter(value.clone()) for value in values]
    ours, theirs = optimizer_class(parameters, **options), optimizer_class(plain, **options)
    for step in range(4):
        for number, (parameter, own) in enumerate(zip(parameters, plain, strict=True)):
            own.grad = random_gradient(own, seed=10 * step + number)
            parameter.grad = own.grad.clone()
        kept = [parameter.grad for parameter in parameters]
        optimizer_step(ours)
        theirs.step()
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, kept, strict=True))
    for parameter, own in zip(parameters, plain, strict=True):
        assert torch.equal(bits(local_part(parameter).detach()), bits(own.detach()))
        assert list(ours.state[parameter]) == list(theirs.state[own])
        for key, value in theirs.state[own].items():
            mine = ours.state[parameter][key]
            assert torch.equal(bits(local_part(mine)), bits(value)), key
            is_wrapped = kind == "wrapping" and isinstance(parameter, Kept) and value.dim() > 0
            assert isinstance(mine, Kept) == is_wrapped
