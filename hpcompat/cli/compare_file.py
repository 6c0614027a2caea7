"""Recordings as ``hpcompat.record`` writes them: read phase by phase, and laid side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcompat.cli.compare_bits import Difference, Tensor, compare, number, read
from hpcompat.cli.errors import CommandError
from hpcompat.record import FORMAT, INDEX, PHASES

# A loss comes of the parameters, gradients come of the loss.
KINDS = ("parameter", "loss", "gradient")

Key = tuple[str, str]
Moment = tuple[int, str]


@dataclass(frozen=True)
class Run:
    """One recording. ``moments`` are its complete phases, in order."""

    directory: Path
    description: dict[str, Any]
    moments: dict[Moment, Path]
    renamed: Mapping[str, str]

    @property
    def label(self) -> str:
        about = self.description
        ranks = f"{about['world_size']} rank{'' if about['world_size'] == 1 else 's'}"
        return f"{about['framework']} {about['versions'][about['framework']]}, {ranks}"

    def tensors(self, moment: Moment) -> dict[Key, Path | Tensor]:
        """Where each tensor of a phase is, and the losses themselves, by kind and name."""
        folder = self.moments[moment]
        index = _json(folder / INDEX)
        found: dict[Key, Path | Tensor] = {
            (entry["kind"], self._name(entry["name"])): folder / entry["file"] for entry in index["tensors"]
        }
        for place, loss in enumerate(index["losses"]):
            found["loss", str(place)] = number(float.fromhex(loss["value"]), loss["dtype"])
        return found

    def _name(self, name: str) -> str:
        return ".".join(self.renamed.get(part, part) for part in name.split("."))


@dataclass(frozen=True)
class Row:
    """One tensor of one phase, on both sides."""

    step: int
    phase: str
    kind: str
    name: str
    difference: Difference


@dataclass
class Comparison:
    """Every tensor that both have, in order; ``problems`` says what could not be compared."""

    runs: tuple[Run, Run]
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def first(self) -> Row | None:
        """The first tensor that differs."""
        return next((row for row in self.rows if row.difference.num_differing), None)


def load(directory: Path, *, renamed: Mapping[str, str]) -> Run:
    """Read what was recorded, but no tensors."""
    description = _json(directory / INDEX)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CommandError(
            f"expected a recording of format {FORMAT}, as hpcompat.record writes it, but got another file: "
            f"{str(directory / INDEX)!r}"
        )
    moments = {}
    for folder in sorted(directory.glob("step-*")):
        for phase in PHASES:
            if (folder / phase / INDEX).is_file():
                moments[int(folder.name.removeprefix("step-")), phase] = folder / phase
    if not moments:
        raise CommandError(f"expected a recording with a complete phase, but got none in {str(directory)!r}")
    return Run(directory, description, moments, renamed)


def compare_runs(one: Run, other: Run, *, limit_ulp: int) -> Comparison:
    """Compare everything that both have recorded, one pair of tensors in memory at a time."""
    result = Comparison((one, other))
    for run, lacking in ((one, other), (other, one)):
        missing = [f"step {step} {phase}" for step, phase in run.moments if (step, phase) not in lacking.moments]
        if missing:
            result.problems.append(f"only in {run.directory}: {_listed(missing)}")
    for moment in sorted(one.moments.keys() & other.moments.keys(), key=_in_order):
        result.rows.extend(_compare_moment(result, moment, limit_ulp=limit_ulp))
    return result


def _compare_moment(result: Comparison, moment: Moment, *, limit_ulp: int) -> Iterator[Row]:
    step, phase = moment
    mine, theirs = (run.tensors(moment) for run in result.runs)
    for run, found, others in ((result.runs[0], mine, theirs), (result.runs[1], theirs, mine)):
        missing = [f"{kind} {name}" for kind, name in found if (kind, name) not in others]
        if missing:
            result.problems.append(f"only in {run.directory}, step {step} {phase}: {_listed(missing)}")
    keys = sorted((key for key in mine if key in theirs), key=lambda key: _rank_of(key[0]))
    for kind, name in keys:
        sides = [_tensor(found[kind, name]) for found in (mine, theirs)]
        if sides[0].dtype != sides[1].dtype or sides[0].shape != sides[1].shape:
            described = " and ".join(f"{side.dtype} of shape {side.shape}" for side in sides)
            result.problems.append(f"step {step} {phase}: {kind} {name} is {described}")
        else:
            yield Row(step, phase, kind, name, compare(*sides, limit_ulp=limit_ulp))


def _tensor(source: Path | Tensor) -> Tensor:
    return read(source) if isinstance(source, Path) else source


def _in_order(moment: Moment) -> tuple[int, int]:
    return moment[0], PHASES.index(moment[1])


def _rank_of(kind: str) -> int:
    """States after everything else."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"expected a file that hpcompat.record wrote, but got {str(path)!r}: {error}") from error
