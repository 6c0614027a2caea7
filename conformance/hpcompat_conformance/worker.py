"""One rank of a pool: set up once, then run jobs until the pool hangs up.

Started as ``python -m hpcompat_conformance.worker`` by `hpcompat_conformance.pool`; not meant to be run by hand.

[Note: how a hung worker dies] Nobody can interrupt a thread that sits in a collective, so the pool sends SIGUSR1:
faulthandler writes every Python stack from inside the signal handler, then chains to the default action, which ends the
process. The pool sees the pipe close and reads the file. The watchdog of `_serve` covers a pool that is itself gone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from hpcompat_conformance import context as worker_context
from hpcompat_conformance.failures import RemoteError
from hpcompat_conformance.protocol import Job, Reply
from hpcompat_conformance.reference import Reference

Tidy = Callable[[], dict[str, int]]

ORPHAN_MARGIN_SECONDS = 30.0


def main(argv: list[str] | None = None) -> None:
    """Parse the pool's options, set up, serve. Never returns normally: a clean-up that hangs must not matter."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args(argv)
    stacks = (args.scratch / f"rank{args.rank}.stacks").open("w")
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=True)
    connection = Connection(args.connection)
    worker_context.enter(worker_context.WorkerContext(args.rank, args.world_size, args.scratch))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the pool hung up
        tidy, reply = _set_up(pickle.loads(connection.recv_bytes()))
        connection.send_bytes(pickle.dumps(reply))
        if reply.error is None:
            _serve(connection, tidy=tidy)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _set_up(target: Reference) -> tuple[Tidy, Reply]:
    try:
        tidy: Tidy | None = target.resolve()(worker_context.current())
        return tidy or _nothing_to_tidy, Reply()
    except BaseException as error:
        return _nothing_to_tidy, Reply(error=describe(error))


def _nothing_to_tidy() -> dict[str, int]:
    return {}


def _serve(connection: Connection, *, tidy: Tidy) -> None:
    while True:
        job: Job = pickle.loads(connection.recv_bytes())
        faulthandler.dump_traceback_later(job.deadline + ORPHAN_MARGIN_SECONDS, exit=True)
        reply = _run(job, tidy=tidy)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(reply))


def _run(job: Job, *, tidy: Tidy) -> Reply:
    reply = _attempt(job)
    # After `_attempt` has returned: its frames held the job's tensors.
    try:
        reply.positions = tidy()
    except Exception as error:
        reply.error = reply.error or describe(error)
    return reply


def _attempt(job: Job) -> Reply:
    try:
        for entry in job.path:
            if entry not in sys.path:
                sys.path.append(entry)
                importlib.invalidate_caches()
        function = job.target.resolve()
        # Only now: the arguments may be instances of classes of the function's module.
        kwargs = pickle.loads(job.kwargs)
        return Reply(value=pickle.dumps(function(**kwargs)))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return Reply(error=describe(error))


def describe(error: BaseException) -> RemoteError:
    """An exception as text, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    bases = tuple(base.__name__ for base in type(error).__mro__)
    return RemoteError(kind=type(error).__name__, message=str(error), traceback=text, bases=bases)


if __name__ == "__main__":
    main()
