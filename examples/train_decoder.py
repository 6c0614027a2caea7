"""Train a small Llama-style decoder on real text with hpcompat, on 1 or more processes.

    hpcompat launch -n 2 examples/train_decoder.py --compare native
    torchrun --nproc-per-node 2 examples/train_decoder.py --mesh hsdp --dtype bf16
    python examples/train_decoder.py --steps 20

This file imports no framework. The model, and the few functions that differ between frameworks, are in
`decoder_<backend>.py`; `framework.py` says what they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

import report
from comparison import Counts, Snapshot, count_differences, count_loss_differences
from corpus import Corpus, standard_library_text
from framework import Framework, World, load_framework
from options import Options, parse_options


@dataclass(frozen=True)
class Job:
    """What every step of this process needs and none changes."""

    framework: Framework
    options: Options
    world: World
    corpus: Corpus


def train_step(job: Job, *, model: Any, optimizer: Any, step: int) -> float:
    """One update from `accumulate` microbatches, of which only the last communicates gradients. The mean loss."""
    framework, options, world = job.framework, job.options, job.world
    framework.zero_gradients(optimizer)
    loss = 0.0
    for microbatch in range(options.accumulate):
        is_last = microbatch == options.accumulate - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        index = step * options.accumulate + microbatch
        batch = job.corpus.batch(index, batch_size=options.batch, rank=world.rank, world_size=world.size)
        microbatch_loss = framework.compute_loss(model, batch, world=world)
        loss += framework.backward(microbatch_loss, num_microbatches=options.accumulate) / options.accumulate
    framework.clip_gradients(model, max_norm=options.clip)
    framework.optimizer_step(optimizer)
    return framework.mean_over_ranks(loss, world=world)


def train(job: Job, *, implementation: str) -> tuple[report.Result, Snapshot]:
    """A whole training from the weights that the seed gives; what it showed, and the state it ended in."""
    framework, options, world = job.framework, job.options, job.world
    model = framework.build_model(options)
    framework.shard_model(model, options=options, world=world, implementation=implementation)
    optimizer = framework.make_optimizer(model, options=options)
    probe = framework.watch_unsharded_bytes(model)
    losses, seconds = [], []
    with report.progress(f"{implementation:>8}", num_steps=options.steps, visible=world.rank == 0) as advance:
        for step in range(options.steps):
            started = time.perf_counter()
            losses.append(train_step(job, model=model, optimizer=optimizer, step=step))
            seconds.append(time.perf_counter() - started)
            advance(losses[-1])
            probe.close()  # The first step has shown the peak; the timed ones run without the probe.
    result = report.Result(
        losses=losses,
        step_seconds=seconds,
        tokens_per_step=options.batch * options.seq_len * options.accumulate * world.size,
        sharded_bytes=framework.sharded_bytes(model),
        peak_unsharded_bytes=probe.peak_bytes,
    )
    return result, framework.snapshot(model, optimizer)


def run(job: Job) -> int:
    """The exit code: 1 if a comparison was asked for and anything differs on any rank."""
    results, differences = {}, {}
    results["ours"], our_state = train(job, implementation="hpcompat")
    if job.options.compare:
        results["native"], native_state = train(job, implementation=job.options.compare)
        for kind, counts in count_differences(our_state, native_state).items():
            differences[kind] = job.framework.sum_over_ranks(counts, world=job.world)
        differences["losses"] = count_loss_differences(results["ours"].losses, results["native"].losses)
    if job.world.rank == 0:
        publish(results, differences=differences, folder=job.options.out)
    return int(any(counts.differing for counts in differences.values()))


def publish(results: dict[str, report.Result], *, differences: dict[str, Counts], folder: Path) -> None:
    console = Console()
    report.print_results(results, console=console)
    if differences:
        report.print_differences(differences, console=console)
    folder.mkdir(parents=True, exist_ok=True)
    losses = report.write_losses(folder, results, differences=differences)
    curve = report.plot_losses(folder, results)
    console.print(f"wrote {losses} and {curve}", highlight=False, soft_wrap=True)


def main() -> NoReturn:
    options = parse_options()
    framework = load_framework(options.backend)
    world = framework.start(options)
    corpus = Corpus(standard_library_text(), seq_len=options.seq_len, seed=options.seed)
    exit_code = run(Job(framework, options, world, corpus))
    framework.finish(exit_code)  # Not after an error: the other ranks may never come to the end, and it would wait.


if __name__ == "__main__":
    main()
