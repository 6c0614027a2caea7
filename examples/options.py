"""The command line of `train_decoder.py`, parsed into one frozen `Options`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcompat.registry import ENV_VAR, canonical_name

VOCABULARY = 256
"""One token per byte value."""
NORM_EPS = 1e-6
"""Added under the root of every RMSNorm."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """All that a run depends on. `reshard` is what `fully_shard` takes as `reshard_after_forward` (None: automatic)."""

    backend: str = "torch"
    device: str | None = None
    mesh: str = "fsdp"
    reshard: bool | int | None = None
    dtype: str = "fp32"
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    tied: bool = False
    seq_len: int = 128
    batch: int = 8
    accumulate: int = 1
    steps: int = 60
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    out: Path = Path("train_decoder_out")
    compare: str | None = None

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def hidden_size(self) -> int:
        """Of the feed-forward network: 8/3 of the width, rounded up to a multiple of 32."""
        return 32 * math.ceil(self.width * 8 / 3 / 32)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    parser = _parser()
    options = Options(**vars(parser.parse_args(argv)))
    problem = _problem_with(options)
    if problem:
        parser.error(problem)
    return options


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, but got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        description="Train a small Llama-style decoder on the standard library's sources with hpcompat.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run = parser.add_argument_group("where and how it is sharded")
    run.add_argument(
        "--backend",
        type=canonical_name,
        choices=["torch", "mindspore"],
        default=os.environ.get(ENV_VAR) or default.backend,
        help="the framework that trains; hpcompat launch has its own --backend and passes it on",
    )
    run.add_argument(
        "--device", choices=["cpu", "cuda", "npu"], help="by default the accelerator, if each rank has one"
    )
    run.add_argument("--mesh", choices=["fsdp", "hsdp"], default=default.mesh, help="hsdp: 2 replicas of n/2 shards")
    run.add_argument("--reshard", type=_reshard, default=default.reshard, metavar="true|false|auto|INT")
    run.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default=default.dtype, help="dtype of computation")
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=positive, default=default.layers)
    model.add_argument("--width", type=positive, default=default.width)
    model.add_argument("--heads", type=positive, default=default.heads)
    model.add_argument("--kv-heads", type=positive, default=default.kv_heads)
    model.add_argument("--tied", action="store_true", help="the head uses the embedding's weight")
    training = parser.add_argument_group("the training")
    training.add_argument("--seq-len", type=positive, default=default.seq_len)
    training.add_argument("--batch", type=positive, default=default.batch, help="sequences per rank and microbatch")
    training.add_argument("--accumulate", type=positive, default=default.accumulate, help="microbatches per step")
    training.add_argument("--steps", type=positive, default=default.steps)
    training.add_argument("--lr", type=float, default=default.lr)
    training.add_argument("--clip", type=float, default=default.clip, help="largest norm of the gradient")
    training.add_argument("--seed", type=int, default=default.seed)
    result = parser.add_argument_group("the result")
    result.add_argument("--out", type=Path, default=default.out, metavar="DIR", help="for losses.json and loss.png")
    result.add_argument("--compare", choices=["native"], help="train native FSDP2 too; exit 1 if any bit differs")
    return parser


def _problem_with(options: Options) -> str | None:
    launched = canonical_name(os.environ.get(ENV_VAR) or options.backend)
    if options.backend != launched:
        return (
            f"expected --backend {launched}, which the ranks were launched for, but got {options.backend}; "
            f"start them with hpcompat launch --backend {options.backend}"
        )
    if options.compare == "native" and options.backend != "torch":
        return (
            f"expected --backend torch with --compare native, but got {options.backend}, which has no FSDP2 of its "
            "own; compare the losses of two runs with compare_backends.py"
        )
    if options.width % options.heads:
        return f"expected --width to be a multiple of --heads {options.heads}, but got {options.width}"
    if options.head_size % 2:
        return f"expected an even head size for rotary embeddings, but got {options.head_size}"
    if options.heads % options.kv_heads:
        return f"expected --heads to be a multiple of --kv-heads {options.kv_heads}, but got {options.heads}"
    return None


def _reshard(text: str) -> bool | int | None:
    words: dict[str, bool | None] = {"true": True, "false": False, "auto": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"expected true, false, auto or a number of ranks, but got {text!r}")
