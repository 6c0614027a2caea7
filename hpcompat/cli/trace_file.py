"""Reading what ``Recording.to_chrome`` wrote: one rank per file, or several in a merged one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcompat.cli.errors import CommandError
from hpcompat.core.spans import Span
from hpcompat.trace import FORMAT


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank. Times count from the earliest start of all ranks that were loaded together."""

    rank: int
    world_size: int
    backend: str
    has_streams: bool
    units: tuple[str, ...]
    spans: tuple[Span, ...]
    start_ns: int
    end_ns: int


def load(paths: Sequence[Path]) -> list[RankTrace]:
    """The traces in ``paths``, by rank.

    Raises:
        CommandError: a file is missing or no trace, or a rank is in two.
    """
    contents = [read(path) for path in paths]
    origin = _origin(contents)
    found: dict[int, RankTrace] = {}
    for path, content in zip(paths, contents, strict=True):
        for description in _ranks(content):
            trace = _parse(path, content, description, origin=origin)
            if trace.rank in found:
                raise CommandError(f"expected every rank once, but got rank {trace.rank} again in {str(path)!r}")
            found[trace.rank] = trace
    return [found[rank] for rank in sorted(found)]


def merge(paths: Sequence[Path], *, out: Path) -> None:
    """Write the ranks of ``paths`` as one file, with times that count from the earliest start.

    Raises:
        CommandError: as ``load``, or ``out`` cannot be written.
    """
    load(paths)  # refuses what does not fit together
    contents = [read(path) for path in paths]
    origin = _origin(contents)
    ranks, entries = [], []
    for content in contents:
        shifts = {}
        for description in _ranks(content):
            shift = shifts[description["pid"]] = (description["start_unix_ns"] - origin) / 1000
            ranks.append({**description, "start_unix_ns": origin, "start_us": description["start_us"] + shift})
        for entry in content["traceEvents"]:
            entries.append({**entry, "ts": entry["ts"] + shifts[entry["pid"]]} if "ts" in entry else entry)
    merged = {**contents[0], "otherData": {"hpcompat": {"format": FORMAT, "ranks": ranks}}, "traceEvents": entries}
    try:
        out.write_text(json.dumps(merged), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"expected to write {str(out)!r}, but got: {error.strerror}") from error


def clip(trace: RankTrace, *, start_ns: int, end_ns: int) -> RankTrace:
    """What lies between the two times, of this rank."""
    kept = tuple(
        span._replace(start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
        for span in trace.spans
        if span.end_ns >= start_ns and span.start_ns <= end_ns
    )
    return replace(trace, spans=kept, start_ns=start_ns, end_ns=end_ns)


def read(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CommandError: there is none, or it is not from ``hpcompat.trace``, or from a later version of it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"expected a trace in {str(path)!r}, but got: {error.strerror}") from error
    except ValueError:
        content = None
    ours = _ours(content)
    if ours is None or not _has_ranks(ours) or not isinstance(content.get("traceEvents"), list):
        raise CommandError(
            f"expected {str(path)!r} to be a trace, but got something else; write one with hpcompat.trace(model) and "
            "recording.to_chrome(path)"
        )
    if ours.get("format") != FORMAT:
        raise CommandError(
            f"expected a trace of format {FORMAT}, but got {ours.get('format')!r} in {str(path)!r}; use the version of "
            "hpcompat that wrote it"
        )
    assert isinstance(content, dict)
    return content


def _ours(content: object) -> dict[str, Any] | None:
    other = content.get("otherData") if isinstance(content, dict) else None
    ours = other.get("hpcompat") if isinstance(other, dict) else None
    return ours if isinstance(ours, dict) else None


def _has_ranks(ours: dict[str, Any]) -> bool:
    ranks = ours.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        return False
    return all(isinstance(each, dict) and isinstance(each.get("start_unix_ns"), int) for each in ranks)


def _ranks(content: dict[str, Any]) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = content["otherData"]["hpcompat"]["ranks"]
    return ranks


def _origin(contents: Iterable[dict[str, Any]]) -> int:
    starts: list[int] = [description["start_unix_ns"] for content in contents for description in _ranks(content)]
    return min(starts)


def _parse(path: Path, content: dict[str, Any], description: dict[str, Any], *, origin: int) -> RankTrace:
    try:
        shift = description["start_unix_ns"] - origin
        start = shift + round(description["start_us"] * 1000)
        return RankTrace(
            rank=description["rank"],
            world_size=description["world_size"],
            backend=description["backend"],
            has_streams=description["has_streams"],
            units=tuple(description["units"]),
            spans=tuple(_span(entry, shift) for entry in content["traceEvents"] if _is_span(entry, description["pid"])),
            start_ns=start,
            end_ns=start + round(description["duration_us"] * 1000),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"expected {str(path)!r} to be as recording.to_chrome wrote it, but got {type(error).__name__}: {error}"
        ) from error


def _is_span(entry: dict[str, Any], pid: int) -> bool:
    return bool(entry["ph"] == "X" and entry["pid"] == pid)


def _span(entry: dict[str, Any], shift: int) -> Span:
    start = round(entry["ts"] * 1000)
    end = start + round(entry["dur"] * 1000)
    args = entry["args"]
    note, size = args.get("note", ""), args.get("bytes", 0)
    return Span(
        entry["cat"], entry["name"], args["unit"], args.get("group", -1), start + shift, end + shift, size, note
    )
