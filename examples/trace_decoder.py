"""Trace one forward and backward of the decoder of `train_decoder.py`, whose options it takes.

    hpcompat launch -n 2 examples/trace_decoder.py --steps 3 --out traces
    hpcompat trace view traces/*.json
    hpcompat trace plot traces/*.json --out trace.svg

The last of `--steps` passes is traced: the first pays for lazy initialization.
"""

from __future__ import annotations

from typing import NoReturn

import hpcompat
from corpus import Corpus, standard_library_text
from framework import load_framework
from options import parse_options
from train_decoder import Job, load_batch, shard_model


def run(job: Job) -> None:
    options = job.options
    model = job.framework.build_model(options)
    shard_model(job, model)
    for step in range(options.steps):
        inputs, targets = load_batch(job, step)
        # So that the recordings begin together.
        hpcompat.barrier()
        with hpcompat.trace(model) as recording:
            hpcompat.backward(job.framework.cross_entropy(model(inputs), targets))
    options.out.mkdir(parents=True, exist_ok=True)
    recording.to_chrome(options.out / f"trace-rank{recording.rank}.json")


def main() -> NoReturn:
    options = parse_options()
    framework = load_framework(options.backend)
    framework.prepare()
    hpcompat.init_process_group(backend=options.backend, device=options.device)
    run(Job(options, framework, Corpus(standard_library_text(), seq_len=options.seq_len, seed=options.seed)))
    hpcompat.barrier()
    hpcompat.destroy_process_group()
    framework.end_process(0)


if __name__ == "__main__":
    main()
