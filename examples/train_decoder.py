"""Train a small Llama-style decoder on real text with hpcompat, on 1 or more processes, in PyTorch or in MindSpore.

    hpcompat launch -n 2 examples/train_decoder.py --compare native
    hpcompat launch -n 2 --backend mindspore examples/train_decoder.py --backend mindspore
    torchrun --nproc-per-node 2 examples/train_decoder.py --mesh hsdp --dtype bf16
    python examples/train_decoder.py --steps 20

This file imports no framework. The model and what else differs is in `decoder_<backend>.py`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from rich.console import Console

import hpcompat
import report
from comparison import Counts, count_differences, count_loss_differences
from corpus import Corpus, standard_library_text
from framework import Framework, load_framework, load_library
from options import Options, parse_options


@dataclass(frozen=True)
class Job:
    """What every step of this process needs and none changes. `library` is hpcompat, or what it is compared with."""

    options: Options
    framework: Framework
    corpus: Corpus
    library: Any = hpcompat


def shard_model(job: Job, model: Any) -> None:
    """One unit per block, and one of the rest."""
    options, library = job.options, job.library
    policy = library.MixedPrecisionPolicy(
        param_dtype=job.framework.COMPUTE_DTYPES[options.dtype], reduce_dtype=job.framework.REDUCE_DTYPE
    )
    how = {"mesh": make_mesh(options), "mp_policy": policy, "reshard_after_forward": options.reshard}
    for block in model.blocks:
        library.fully_shard(block, **how)
    if options.tied:
        # A shared weight must belong to one unit, so the modules that share it are gathered together.
        library.fully_shard([model.embedding, model.norm, model.head], **how)
    library.fully_shard(model, **how)


def make_mesh(options: Options) -> Any:
    world_size = hpcompat.get_world_size()
    if options.mesh == "fsdp":
        return hpcompat.init_device_mesh(None, (world_size,), mesh_dim_names=("dp_shard",))
    if world_size % 2:
        raise ValueError(f"expected an even number of ranks for --mesh hsdp, but got {world_size}; use --mesh fsdp")
    return hpcompat.init_device_mesh(None, (2, world_size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def train_step(job: Job, model: Any, optimizer: Any, *, step: int) -> float:
    """One update from `accumulate` microbatches, of which only the last communicates gradients. The mean loss."""
    options, library = job.options, job.library
    library.zero_grad(optimizer)
    total = 0.0
    for microbatch in range(options.accumulate):
        is_last = microbatch == options.accumulate - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        inputs, targets = load_batch(job, step * options.accumulate + microbatch)
        loss = job.framework.cross_entropy(model(inputs), targets)
        library.backward(loss / options.accumulate)
        total += float(hpcompat.to_numpy(loss)) / options.accumulate
    library.clip_grad_norm_(library.parameters(model), options.clip)
    library.optimizer_step(optimizer)
    return hpcompat.all_reduce_scalar(total, op="avg")


def load_batch(job: Job, index: int) -> tuple[Any, Any]:
    """Inputs and targets of this rank, both (batch, seq_len)."""
    rank, world_size = hpcompat.get_rank(), hpcompat.get_world_size()
    windows = job.corpus.batch(index, batch_size=job.options.batch, rank=rank, world_size=world_size)
    return hpcompat.from_numpy(windows[:, :-1]), hpcompat.from_numpy(windows[:, 1:])


def train(job: Job, *, title: str) -> tuple[report.Result, Any, Any]:
    """A whole training from the initial weights: what it showed, the model and the optimizer."""
    options, library = job.options, job.library
    model = job.framework.build_model(options)
    shard_model(job, model)
    optimizer = library.optim.AdamW(library.parameters(model), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    probe = job.framework.watch_unsharded_bytes(model)
    losses, seconds = [], []
    with report.progress(f"{title:>9}", num_steps=options.steps, visible=hpcompat.get_rank() == 0) as advance:
        for step in range(options.steps):
            started = time.perf_counter()
            losses.append(train_step(job, model, optimizer, step=step))
            seconds.append(time.perf_counter() - started)
            advance(losses[-1])
            probe.close()  # The first step has shown the peak; the timed ones run without the probe.
    result = report.Result(
        losses=losses,
        step_seconds=seconds,
        tokens_per_step=options.batch * options.seq_len * options.accumulate * hpcompat.get_world_size(),
        sharded_bytes=sum(hpcompat.to_numpy(parameter).nbytes for parameter in library.parameters(model)),
        peak_unsharded_bytes=probe.peak_bytes,
    )
    return result, model, optimizer


def run(options: Options, framework: Framework) -> int:
    """The exit code: 1 if a comparison was asked for and anything differs on any rank."""
    corpus = Corpus(standard_library_text(), seq_len=options.seq_len, seed=options.seed)
    results, differences = {}, {}
    results["ours"], *ours = train(Job(options, framework, corpus), title=options.backend)
    if options.compare:
        library = load_library(options.compare)
        our_state = library.snapshot(*ours)
        results[options.compare], *theirs = train(Job(options, framework, corpus, library), title=options.compare)
        for kind, counts in count_differences(our_state, library.snapshot(*theirs)).items():
            differences[kind] = Counts(*(int(hpcompat.all_reduce_scalar(count)) for count in counts))
        differences["losses"] = count_loss_differences(*(result.losses for result in results.values()))
    if hpcompat.get_rank() == 0:
        publish(options, results, differences=differences)
    return int(any(counts.differing for counts in differences.values()))


def publish(options: Options, results: dict[str, report.Result], *, differences: dict[str, Counts]) -> None:
    """On one rank: the tables, `losses.json` and `loss.png`."""
    console = Console()
    report.print_results(results, title=f"Training in {options.backend}", console=console)
    if differences:
        report.print_differences(differences, console=console)
    options.out.mkdir(parents=True, exist_ok=True)
    losses, curve = options.out / "losses.json", options.out / "loss.png"
    described = {**asdict(options), "out": str(options.out), "num_ranks": hpcompat.get_world_size()}
    report.write_losses(losses, results, differences=differences, run=described)
    report.plot_losses(curve, {name: result.losses for name, result in results.items()})
    console.print(f"wrote {losses} and {curve}", highlight=False, soft_wrap=True)


def main() -> NoReturn:
    options = parse_options()
    framework = load_framework(options.backend)
    framework.prepare()
    hpcompat.init_process_group(backend=options.backend, device=options.device)
    exit_code = run(options, framework)
    # Not after an error: the other ranks may never come to the end, and this one would wait.
    hpcompat.barrier()
    hpcompat.destroy_process_group()
    framework.end_process(exit_code)


if __name__ == "__main__":
    main()
