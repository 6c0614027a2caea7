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
    Misuse(
        "policy-param-dtype-string",
        _policy(param_dtype="bf16"),
        (TypeError,),
        r"expected mp_policy.param_dtype to be a torch.dtype, but got 'bf16'",
        r"torch.dtype",
    ),
    Misuse(
        "policy-reduce-dtype-string",
        _policy(reduce_dtype="fp32"),
        (TypeError,),
        r"expected mp_policy.reduce_dtype to be a torch.dtype, but got 'fp32'",
        r"torch.dtype",
    ),
    Misuse(
        "policy-output-dtype-string",
        _policy(output_dtype="fp32"),
        (TypeError,),
        r"expected mp_policy.output_dtype to be a torch.dtype, but got 'fp32'",
        r"torch.dtype",
    ),
    Misuse(
        "policy-integer-dtype",
        _policy(param_dtype=torch.int8),
        (ValueError,),
        r"expected mp_policy.param_dtype to be a floating dtype, but got torch.int8",
        r"floating dtype",
    ),
    Misuse(
        "policy-dtype-in-its-place",
        lambda api: wrapped(api, mp_policy=torch.bfloat16),
        (TypeError,),
        r"expected mp_policy to be a MixedPrecisionPolicy, but got torch.bfloat16",
        r"MixedPrecisionPolicy",
    ),
    Misuse(
        "policy-none",
        lambda api: wrapped(api, mp_policy=None),
        (TypeError,),
        r"expected mp_policy to be a MixedPrecisionPolicy, but got None",
        r"MixedPrecisionPolicy",
    ),
    Misuse(
        "offload-policy-bool",
        lambda api: wrapped(api, offload_policy=True),
        (TypeError,),
        r"expected offload_policy to be an OffloadPolicy, but got True",
        r"OffloadPolicy",
    ),
    Misuse(
        "offload-policy-class",
        lambda api: wrapped(api, offload_policy=api.CPUOffloadPolicy),
        (TypeError,),
        r"expected offload_policy to be an OffloadPolicy, but got <class '.*CPUOffloadPolicy'>",
        r"OffloadPolicy",
    ),
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

ARGUMENT_ROWS = [
    Misuse(
        "comm-fusion-string",
        lambda api: wrapped(api, comm_fusion="yes"),
        (TypeError,),
        r"expected comm_fusion to be a bool, but got 'yes'",
        r"a bool",
    ),
    Misuse(
        "comm-fusion-none",
        lambda api: wrapped(api, comm_fusion=None),
        (TypeError,),
        r"expected comm_fusion to be a bool, but got None",
        r"a bool",
    ),
    Misuse(
        "zero-copy-int",
        lambda api: wrapped(api, comm_fusion_zero_copy=1),
        (TypeError,),
        r"expected comm_fusion_zero_copy to be a bool.*but got 1",
        r"a bool or None",
    ),
    Misuse(
        "ignored-params-string",
        lambda api: wrapped(api, ignored_params="weight"),
        (TypeError,),
        r"expected ignored_params to be a set of parameters, but got 'weight'",
        r"a set of parameters",
        native=TypeError,
    ),
    Misuse(
        "ignored-params-names",
        lambda api: wrapped(api, ignored_params={"weight"}),
        (TypeError,),
        r"expected ignored_params to hold parameters, but got a str: 'weight'",
        r"to hold parameters",
    ),
    Misuse(
        "ignored-params-one-parameter",
        _ignore(lambda module: module.weight),
        (TypeError,),
        r"expected ignored_params to hold parameters, but got a Tensor",
        r"to hold parameters",
    ),
    Misuse(
        "ignored-params-module",
        _ignore(lambda module: {module}),
        (TypeError,),
        r"expected ignored_params to hold parameters, but got a Linear",
        r"to hold parameters",
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
    Misuse(
        "reshard-string",
        lambda api: wrapped(api, reshard_after_forward="yes"),
        (ValueError,),
        r"reshard_after_forward should be a bool or an int .*, but got 'yes'",
        r"a bool or an int representing the group size",
        native=ValueError,
    ),
    Misuse(
        "reshard-float",
        lambda api: wrapped(api, reshard_after_forward=1.0),
        (ValueError,),
        r"reshard_after_forward should be a bool or an int .*, but got 1\.0",
        r"a bool or an int representing the group size",
        native=ValueError,
    ),
    Misuse(
        "reshard-not-a-divisor",
        lambda api: wrapped(api, reshard_after_forward=3),
        (ValueError,),
        r"reshard_after_forward as an int, it should be a factor of 2, but got 3",
        r"pass True, False or a divisor of the shard axis",
        "RSF-11",
        native=ValueError,
        world_size=2,
    ),
    Misuse(
        "reshard-larger-than-the-axis",
        lambda api: wrapped(api, reshard_after_forward=4),
        (ValueError,),
        r"reshard_after_forward as an int, it should be a factor of 2, but got 4",
        r"pass True, False or a divisor of the shard axis",
        "RSF-11",
        native=ValueError,
        world_size=2,
    ),
    Misuse(
        "reshard-zero",
        lambda api: wrapped(api, reshard_after_forward=0),
        (ValueError,),
        r"reshard_after_forward as an int, it should be a factor of 1, but got 0",
        r"pass True, False or a divisor of the shard axis",
        "RSF-11",
        native=ValueError,
    ),
]
ROWS = [*POLICY_ROWS, *ARGUMENT_ROWS]
