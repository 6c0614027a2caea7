"""What the command line chose, for the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    case_names: tuple[str, ...]
    num_ranks: int
    num_threads: int
    num_rounds: int | None
    num_steps: int
    memory: bool
    profile: bool
