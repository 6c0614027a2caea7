"""Arguments of ``fully_shard``: policies, parameter sets, resharding."""

from __future__ import annotations

from typing import Any

import torch

from hpcompat import CapabilityError
from misuse.models import linear, wrapped
from misuse.row import Misuse


def _policy(**arguments: Any) -> Any:
    return lambda api: wrapped(api, mp_policy=api.MixedPrecisionPolicy(**arguments))


def _ignore(choose: Any) -> Any:
    def provoke(api: Any) -> None:
        module = linear()
        api.fully_shard(module, ignored_params=choose(module))

    return provoke


def _ignored_and_replicated(api: Any) -> None:
    module = linear()
    api.fully_shard(module, ignored_params={module.weight}, replicate_params={module.weight})


POLICY_ROWS = [
    Misuse(f"policy-{name}", _policy(**arguments), (error,), message, advice)
    for name, arguments, error, message, advice in [
        (
            f"{argument.replace('_', '-')}-string",
            {argument: "bf16"},
            TypeError,
            f"expected mp_policy.{argument} to be a torch.dtype, but got 'bf16'",
            "torch.dtype",
        )
        for argument in ("param_dtype", "reduce_dtype", "output_dtype")
    ]
    + [
        (
            "integer-dtype",
            {"param_dtype": torch.int8},
            ValueError,
            "expected mp_policy.param_dtype to be a floating dtype, but got torch.int8",
            "floating dtype",
        )
    ]
]

TYPE_ROWS = [
    Misuse(
        name,
        lambda api, argument=argument, make=make: wrapped(api, **{argument: make(api)}),
        (TypeError,),
        rf"expected {argument} to be {meant}.*, but got {got}",
        meant,
    )
    for name, argument, make, meant, got in [
        ("policy-dtype-in-its-place", "mp_policy", lambda api: torch.bfloat16, "a MixedPrecisionPolicy", "torch.bfl"),
        ("policy-none", "mp_policy", lambda api: None, "a MixedPrecisionPolicy", "None"),
        ("offload-policy-bool", "offload_policy", lambda api: True, "an OffloadPolicy", "True"),
        (
            "offload-policy-class",
            "offload_policy",
            lambda api: api.CPUOffloadPolicy,
            "an OffloadPolicy",
            "<class '.*CPU",
        ),
        ("comm-fusion-string", "comm_fusion", lambda api: "yes", "a bool", "'yes'"),
        ("comm-fusion-none", "comm_fusion", lambda api: None, "a bool", "None"),
        ("zero-copy-int", "comm_fusion_zero_copy", lambda api: 1, "a bool", "1"),
    ]
]

# Only where there is no accelerator is pinned memory a mistake.
PINNED_ROW = Misuse(
    "offload-pinned-without-accelerator",
    lambda api: wrapped(api, offload_policy=api.CPUOffloadPolicy(pin_memory=True)),
    (CapabilityError, NotImplementedError, RuntimeError),
    r"backend 'torch' lacks the capability 'pinned memory'.*but got .*pin_memory=True",
    r"pass CPUOffloadPolicy\(pin_memory=False\)",
    "OFF-03",
    native=RuntimeError,
)

IGNORED_ROWS = [
    Misuse(
        f"ignored-params-{name}",
        _ignore(choose),
        (TypeError,),
        rf"expected ignored_params to hold parameters, but got a {got}",
        r"to hold parameters",
    )
    for name, choose, got in [
        ("names", lambda module: {"weight"}, "str: 'weight'"),
        ("one-parameter", lambda module: module.weight, "Tensor"),
        ("module", lambda module: {module}, "Linear"),
    ]
]

RESHARD_ROWS = [
    *(
        Misuse(
            f"reshard-{type(value).__name__}",
            lambda api, value=value: wrapped(api, reshard_after_forward=value),
            (ValueError,),
            rf"reshard_after_forward should be a bool or an int .*, but got {value!r}",
            r"a bool or an int representing the group size",
            native=ValueError,
        )
        for value in ("yes", 1.0)
    ),
    *(
        Misuse(
            f"reshard-{name}",
            lambda api, value=value: wrapped(api, reshard_after_forward=value),
            (ValueError,),
            rf"reshard_after_forward as an int, it should be a factor of {world_size}, but got {value}",
            r"pass True, False or a divisor of the shard axis",
            "RSF-11",
            native=ValueError,
            world_size=world_size,
        )
        for name, value, world_size in [("not-a-divisor", 3, 2), ("larger-than-the-axis", 4, 2), ("zero", 0, 1)]
    ),
]

ARGUMENT_ROWS = [
    Misuse(
        "ignored-params-string",
        lambda api: wrapped(api, ignored_params="weight"),
        (TypeError,),
        r"expected ignored_params to be a set of parameters, but got 'weight'",
        r"a set of parameters",
        native=TypeError,
    ),
    Misuse(
        "replicate-params-not-managed",
        lambda api: wrapped(api, replicate_params={linear().weight}),
        (ValueError,),
        r"expected replicate_params to be parameters that this call manages, but got 1 that",
        r"are not in the wrapped modules, are ignored, or belong to a unit already",
        "RPL-06",
    ),
    Misuse(
        "replicate-params-also-ignored",
        _ignored_and_replicated,
        (ValueError,),
        r"expected ignored_params and replicate_params to be apart, but got 1 parameters in both",
        r"to be apart",
        "RPL-06",
    ),
]
ROWS = [*POLICY_ROWS, *TYPE_ROWS, *IGNORED_ROWS, *RESHARD_ROWS, *ARGUMENT_ROWS]
