"""What code that knows FSDP2 by torch's own names finds on our modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate as composable_ddp
from torch.distributed._composable import replicate_with_fsdp

from behaviour.models import (
    WIDTH,
    assert_same_bits,
    batch,
    gradients,
    loss_of,
    mlp,
    shard,
    true_gradients,
    wrap,
)
from behaviour.registry import behaviour
from hpcompat import replicate
from hpcompat_torch.native_view import NativeModule, refuse_unknown_methods


@behaviour()
def modules_are_of_torch_s_kind() -> None:
    module = shard(nn.Linear(WIDTH, 2))
    assert isinstance(module, fsdp.FSDPModule)
    assert not isinstance(module, replicate_with_fsdp.ReplicateModule)
    assert isinstance(replicate(nn.Linear(WIDTH, 2)), replicate_with_fsdp.ReplicateModule)
    assert type(module).__name__.removeprefix("FSDP") == "Linear"


@behaviour(1)
def every_method_of_torch_s_class_is_ours() -> None:
    for wrapped, native in (
        (shard(nn.Linear(WIDTH, 2)), fsdp.FSDPModule),
        (replicate(nn.Linear(WIDTH, 2)), replicate_with_fsdp.ReplicateModule),
    ):
        names = [name for base in native.__mro__[:-1] for name, member in vars(base).items() if callable(member)]
        assert "_apply" in names
        assert len(names) > 20
        owners = {name: getattr(type(wrapped), name).__module__.partition(".")[0] for name in names}
        assert {name: owner for name, owner in owners.items() if not owner.startswith("hpcompat")} == {}


@behaviour(1)
def unknown_methods_of_torch_s_class_are_refused_by_name() -> None:
    class Mixin(NativeModule):
        pass

    def set_something_new(self: object) -> None:
        """A method that a later torch might have."""

    NativeModule.set_something_new = set_something_new  # type: ignore[attr-defined]
    try:
        refuse_unknown_methods(Mixin, ours=type("Ours", (), {}))
        with pytest.raises(NotImplementedError, match=r"set_something_new\(\).*does not know; leave the call out"):
            Mixin.set_something_new(None)
    finally:
        del NativeModule.set_something_new  # type: ignore[attr-defined]


@behaviour()
def torch_s_state_is_a_view_of_the_unit() -> None:
    model = wrap(mlp())
    state = fsdp.fully_shard.state(model)
    assert len(state._state_ctx.all_states) == 1
    model(batch())
    assert state._is_root
    units = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    assert len(state._state_ctx.all_states) == len(units)
    assert model._get_fsdp_state()._fsdp_param_group is None  # all parameters are in the units of its layers
    assert model[0]._get_fsdp_state()._fsdp_param_group is not None
    with pytest.raises(AttributeError, match=r"view of FSDP2's state has no '_lazy_init'"):
        state._lazy_init()
    assert fsdp.fully_shard.state(nn.Linear(1, 1)) is None
    replicated = replicate(nn.Linear(WIDTH, 2))
    assert replicate_with_fsdp.replicate.state(replicated)._is_root is None


@behaviour()
def torch_s_composable_apis_know_our_modules() -> None:
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fsdp.fully_shard(shard(nn.Linear(WIDTH, 2)))
    model = wrap(mlp())
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        composable_ddp(model)


@behaviour(1)
def pickles_are_refused_with_the_way_to_save() -> None:
    model = wrap(mlp())
    for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=r"pickled FSDPSequential.*Save model.state_dict\(\)"):
            save(model)
    assert type(copy.copy(model)) is nn.Sequential


@behaviour(2)
def torch_s_composable_ddp_goes_around_units() -> None:
    """It averages what the units do not."""
    model, plain = mlp(), mlp()
    shard(model[0])
    composable_ddp(model)
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(plain))
