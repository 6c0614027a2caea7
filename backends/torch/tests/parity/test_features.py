"""Single features, bit for bit against native FSDP2: forward patterns, checkpointing, meta device, DTensors."""

from __future__ import annotations

import pytest

from covering import covering
from parity.checks import check_same_bits
from parity.combos import Combo, identity
from parity.features import PATTERNS
from parity.running import Compare

pytestmark = pytest.mark.thorough

SETTINGS = [
    (1, "fsdp", True, "fp32", 1),
    (2, "fsdp", True, "bf16", 1),
    (2, "fsdp", False, "fp32", 4),
    (4, "fsdp", 2, "fp32", 1),
    (4, "hsdp", True, "fp16", 4),
]
COMBOS = [
    *(Combo(model, *setting) for model in PATTERNS for setting in SETTINGS),
    *(Combo("unused", *setting) for setting in SETTINGS if setting[-2] != "bf16"),
    Combo("unused", 2, options=("fill-unused",)),
    Combo("unused", 2, accumulation=4, options=("evaluate",)),
    Combo("unused", 4, "hsdp", 2, "fp16", 4, ("evaluate",)),
    Combo("unused", 4, "hsdp", 2, "fp32", 4, ("fill-unused",)),
    Combo("mlp", 2, options=("columns",)),
    Combo("mlp", 4, "fsdp", False, "bf16", 4, ("columns",)),
    Combo("decoder", 4, "hsdp", True, "bf16", 1, ("columns",)),
    Combo("decoder", 2, "fsdp", True, "fp16", 4, ("columns", "state-dict")),
    Combo("frozen", 2, options=("thaw",)),
    Combo("frozen", 4, "hsdp", 2, "bf16", 4, ("thaw",)),
    Combo("uneven", 4, options=("clip", "state-dict")),
    Combo("decoder", 4, "hsdp", True, "bf16", 1, ("clip", "state-dict")),
    Combo("buffers", 2, "fsdp", True, "fp32", 1, ("state-dict", "evaluate")),
    *(
        Combo(model, world, "fsdp", reshard, policy, 1, ("peek", *options))
        for model, policy in (("nested", "bf16"), ("uneven", "fp32"), ("list", "fp32"), ("tied", "fp32"))
        for world, reshard, *options in ((2, True), (2, False), (4, 2), (2, True, "automatic"))
    ),
    Combo("generate", 2, options=("method",)),
    Combo("generate", 4, "hsdp", False, "bf16", 4, ("method",)),
    *(
        Combo("nested", world, mesh, reshard, policy, accumulation, options)
        for world, mesh, reshard, policy, accumulation in ((2, "fsdp", True, "bf16", 1), (4, "hsdp", 2, "fp32", 4))
        for options in (
            ("parameter-hook",),
            ("parameter-hook", "sync-always"),
            ("reduce-hook",),
            ("custom-comm",),
            ("manual-unshard",),
            ("manual-reshard",),
            ("two-meshes",),
            ("two-meshes", "no-all-reduce"),
            ("separate-group",),
            ("two-buffers",),
            ("async-unshard",),
            ("async-unshard", "prefetch"),
            ("backward-twice",),
            ("backward-twice", "prefetch"),
        )
    ),
    *(
        Combo(model, world, "replicate", True, policy, accumulation, options)
        for model in ("decoder", "tied", "nested", "list", "frozen")
        for world, policy, accumulation, options in (
            (1, "fp32", 1, ()),
            (2, "bf16", 4, ("clip",)),
            (2, "fp16", 1, ("state-dict",)),
            (4, "fp32", 4, ("sync-always",)),
        )
    ),
    Combo("decoder", 2, "replicate", options=("offload",)),
    Combo("decoder", 2, "replicate", options=("evaluate", "prefetch")),
    Combo("decoder", 2, "replicate", options=("force-sum",)),
    Combo("tp", 2, "fsdp+tp"),
    Combo("tp", 4, "fsdp+tp"),
    Combo("tp", 4, "fsdp+tp", False, "bf16", 4),
    Combo("tp", 4, "fsdp+tp", 2, "fp32", 4, ("clip", "state-dict")),
    Combo("tp", 4, "hsdp+tp", True, "fp32", 4),
    Combo("spmd", 2, "fsdp+tp", options=("dp-dims",)),
    Combo("spmd", 4, "fsdp+tp", options=("dp-dims", "state-dict")),
    Combo("spmd", 4, "fsdp+tp", False, "bf16", 4, ("dp-dims",)),
    Combo("spmd", 4, "hsdp+tp", True, "fp32", 1, ("dp-dims",)),
    Combo("spmd", 4, "fsdp2+tp", True, "fp32", 4, ("dp-dims",)),
]


def feature(combo: Combo) -> tuple[object, ...]:
    """How mesh, policy and microbatches act on one another is for the product."""
    return combo.model, combo.options, combo.world


@pytest.mark.parametrize("combo", covering(COMBOS, feature, strength=2, id=identity))
def test_same_bits(compare: Compare, combo: Combo) -> None:
    check_same_bits(combo, compare(combo))
