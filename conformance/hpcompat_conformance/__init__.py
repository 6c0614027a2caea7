"""An executable table of who does what FSDP2 does: a spec in clauses, cases that check them, and a runner."""

from hpcompat_conformance.failures import JobFailed, JobTimeout, PoolError, WorkerDied
from hpcompat_conformance.pool import PoolSet, WorkerPool

__all__ = ["JobFailed", "JobTimeout", "PoolError", "PoolSet", "WorkerDied", "WorkerPool"]
