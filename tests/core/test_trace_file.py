"""The file that a recording writes, and what ``hpcompat trace`` makes of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcompat.cli import main, trace_file, trace_summary, trace_view
from hpcompat.core.spans import BLOCKED, LANES, Span
from hpcompat.trace import Recording
from hpcompat_conformance import numpy_reference as ref
from tracing import traced
from training import Net, Stack, initialize, wrap

# The file


@pytest.fixture
def content(rank: ref.Rank, tmp_path: Path) -> dict[str, Any]:
    recording = traced(wrap(Net(), comm_fusion=False))
    recording.to_chrome(tmp_path / "trace.json")
    written: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    return {**written, "recording": recording}


def of_kind(content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [entry for entry in content["traceEvents"] if entry["ph"] == kind]


REQUIRED = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "args": dict},
    "i": {"name": str, "cat": str, "ts": float, "s": str, "args": dict},
    "C": {"name": str, "ts": float, "args": dict},
}


def test_every_entry_is_one_of_the_format(content: dict[str, Any]) -> None:
    assert {entry["ph"] for entry in content["traceEvents"]} == set(REQUIRED)
    for entry in content["traceEvents"]:
        for key, kind in {**REQUIRED[entry["ph"]], "pid": int, "tid": int}.items():
            assert isinstance(entry[key], kind), (key, entry)
        assert entry["pid"] == 1
        assert entry.get("ts", 0.0) >= 0
        assert entry.get("dur", 0.0) >= 0


def test_entries_are_in_order_of_time(content: dict[str, Any]) -> None:
    times = [entry["ts"] for entry in content["traceEvents"] if "ts" in entry]
    assert times == sorted(times)


def test_every_row_has_a_title_and_a_place(content: dict[str, Any]) -> None:
    titles = {entry["tid"]: entry["args"]["name"] for entry in of_kind(content, "M") if entry["name"] == "thread_name"}
    order = {entry["tid"] for entry in of_kind(content, "M") if entry["name"] == "thread_sort_index"}
    assert {entry["tid"] for entry in content["traceEvents"]} == set(titles) == order
    assert titles[1] == "events"
    for entry in of_kind(content, "X"):
        unit = entry["args"]["unit"] or "(root)"
        assert titles[entry["tid"]] == (BLOCKED if entry["cat"] == BLOCKED else f"{entry['cat']} {unit}")
    ranks = [title.partition(" ")[0] for tid, title in sorted(titles.items()) if tid > 1]
    assert ranks == sorted(ranks, key=LANES.index)


def test_spans_of_one_row_do_not_overlap(content: dict[str, Any]) -> None:
    rows = defaultdict(list)
    for entry in of_kind(content, "X"):
        rows[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    # Two groups of a unit travel at the same time and so need two rows.
    assert len(rows) > len({(entry["cat"], entry["args"]["unit"]) for entry in of_kind(content, "X")})
    for spans in rows.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert end <= start + 1e-6


def test_every_event_and_every_span_is_there(content: dict[str, Any]) -> None:
    recording: Recording = content["recording"]
    instants = sorted(of_kind(content, "i"), key=lambda entry: entry["args"]["index"])
    assert [(entry["args"]["event"], entry["args"]["unit"], entry["args"]["state"]) for entry in instants] == [
        (name, unit, state.name) for name, unit, state in recording.events
    ]
    written = Counter((entry["cat"], entry["name"], entry["args"]["unit"]) for entry in of_kind(content, "X"))
    assert written == Counter((span.lane, span.name, span.unit) for span in recording.spans)
    assert all(np.isclose(entry["ts"] * 1000, round(entry["ts"] * 1000), rtol=0, atol=1e-3) for entry in instants)


def test_the_counters_add_up(content: dict[str, Any]) -> None:
    counts = {
        name: [value for entry in of_kind(content, "C") for key, value in entry["args"].items() if key == name]
        for name in ("bytes", "groups")
    }
    sizes = {64, 16}  # weight and bias of one layer
    for values in counts.values():
        assert min(values) == values[-1] == 0
    assert {abs(after - before) for before, after in zip([0, *counts["bytes"]], counts["bytes"], strict=False)} <= sizes
    assert max(counts["groups"]) == 4  # the root and one layer
    assert max(counts["bytes"]) == 2 * sum(sizes)


def test_the_ranks_are_described(content: dict[str, Any]) -> None:
    (described,) = content["otherData"]["hpcompat"]["ranks"]
    assert {key: described[key] for key in ("rank", "pid", "world_size", "backend", "units", "has_streams")} == {
        "rank": 0,
        "pid": 1,
        "world_size": 2,
        "backend": "numpy",
        "units": ["", "a", "b", "c"],
        "has_streams": False,
    }


# The command


@pytest.fixture
def files(reference: ref.NumpyBackend, tmp_path: Path) -> list[str]:
    """The traces of the two ranks of a job."""

    def body(rank: ref.Rank) -> str:
        recording = traced(wrap(initialize(Net())))
        path = tmp_path / f"rank{rank.number}.json"
        recording.to_chrome(path)
        return str(path)

    return ref.World(2).run(body)


def view(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["trace", "view", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["trace", *arguments]) == 2
    return capsys.readouterr().err.removeprefix("hpcompat trace: error: ").rstrip()


def test_the_timeline_has_every_unit_and_lane(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = view(capsys, "--width", "100", *files)
    assert max(map(len, printed)) <= 100
    assert [line[:11] for line in printed if " of 2  numpy" in line] == ["rank 0 of 2", "rank 1 of 2"]
    lanes = [line[:15].split() for line in printed if line[7:14].strip() in ("compute", "comm", "memory")]
    of_one_rank = [[unit, "compute"] for unit in ("(root)", "a", "b", "c")]
    assert [lane for lane in lanes if lane[-1] == "compute"] == of_one_rank * 2
    assert len(lanes) == 2 * 4 * 3


def test_the_table_has_every_unit(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = view(capsys, "--width", "100", files[0])
    start = next(index for index, line in enumerate(printed) if line.startswith("unit "))
    assert printed[start].split() == [
        "unit",
        *("gather", "reduce", "waiting", "exposed", "overlap", "unsharded", "forward", "backward"),
    ]
    rows = [line.split()[:2] for line in printed[start + 2 :] if line.strip()]
    assert rows[:5] == [["(root)", "1"], ["a", "2"], ["b", "2"], ["c", "2"], ["all", "7"]]
    assert any("160 bytes" in line for line in printed)  # the root and one layer


def test_a_window_in_time(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = view(capsys, files[0], "--from", "-1", "--to", "0.25")
    assert printed[0].startswith("rank 0 of 2  numpy  1.25 ms")
    message = error(capsys, "view", files[0], "--from", "2", "--to", "1")
    assert message.startswith("expected --from before --to and some of 0.000 to ")
    assert message.endswith("but got 2.000 to 1.000 ms")
    with pytest.raises(SystemExit):
        main(["trace", "view", files[0], "--from", "soon"])
    assert "expected a time in ms, but got 'soon'" in capsys.readouterr().err


def test_ranks_can_be_chosen(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [line[:6] for line in view(capsys, *files, "--rank", "1") if line.startswith("rank ")] == ["rank 1"]
    assert error(capsys, "view", *files, "--rank", "7") == (
        "expected --rank to be one of [0, 1], but got 7; add that rank's file"
    )


def test_of_many_ranks_the_first_are_shown(
    reference: ref.NumpyBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(rank: ref.Rank) -> str:
        path = tmp_path / f"{rank.number}.json"
        traced(wrap(initialize(Stack()))).to_chrome(path)
        return str(path)

    printed = view(capsys, *ref.World(6).run(body))
    assert printed[0] == "showing 4 of 6 ranks; choose others with --rank"
    assert sum(" of 6  numpy" in line for line in printed) == 4


def test_a_merged_file_shows_the_same(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = tmp_path / "merged.json"
    assert main(["trace", "merge", *reversed(files), "--out", str(merged)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {merged}")
    assert trace_file.load([merged]) == trace_file.load([Path(path) for path in files])
    entries = json.loads(merged.read_text())["traceEvents"]
    assert len(entries) == sum(path.read_text().count('"ph"') for path in map(Path, files))
    assert {entry["pid"] for entry in entries} == {1, 2}
    assert error(capsys, "view", str(merged), files[0]) == (
        f"expected every rank once, but got rank 0 again in {files[0]!r}"
    )


def test_ranks_are_laid_out_by_the_wall_clock(files: list[str], tmp_path: Path) -> None:
    later = json.loads(Path(files[1]).read_text())
    alone = trace_file.load([Path(files[1])])[0].spans
    first = json.loads(Path(files[0]).read_text())["otherData"]["hpcompat"]["ranks"][0]["start_unix_ns"]
    later["otherData"]["hpcompat"]["ranks"][0]["start_unix_ns"] = first + 5_000_000
    Path(files[1]).write_text(json.dumps(later))
    shifted = trace_file.load([Path(path) for path in files])[1]
    assert shifted.start_ns == 5_000_000
    assert [span.start_ns - 5_000_000 for span in shifted.spans] == [span.start_ns for span in alone]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    out = tmp_path / f"trace.{suffix}"
    assert main(["trace", "plot", *files, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    picture = out.read_bytes()
    if suffix == "png":
        assert picture.startswith(b"\x89PNG")
        return
    texts = picture.decode()
    assert all(f">{word}</text>" in texts for word in ("(root)", "a", "b", "c", "all-gather", "reduce-scatter", "ms"))
    assert main(["trace", "plot", *files, "--out", str(out)]) == 0
    assert out.read_bytes() == picture


def test_what_is_no_trace_is_refused(tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gone, other = tmp_path / "gone.json", tmp_path / "other.json"
    assert error(capsys, "view", str(gone)) == f"expected a trace in {str(gone)!r}, but got: No such file or directory"
    for text in ("{", "[]", "{}", '{"traceEvents": []}', '{"otherData": {"hpcompat": {"ranks": []}}}'):
        other.write_text(text)
        assert error(capsys, "plot", str(other)) == (
            f"expected {str(other)!r} to be a trace, but got something else; write one with hpcompat.trace(model) and "
            "recording.to_chrome(path)"
        )
    content = json.loads(Path(files[0]).read_text())
    ours = content["otherData"]["hpcompat"]
    other.write_text(json.dumps({**content, "otherData": {"hpcompat": {**ours, "format": 99}}}))
    assert "expected a trace of format 1, but got 99" in error(capsys, "view", str(other))
    del ours["ranks"][0]["units"]
    other.write_text(json.dumps(content))
    assert "to be as recording.to_chrome wrote it, but got KeyError: 'units'" in error(capsys, "view", str(other))


def test_a_picture_needs_a_kind_and_a_place(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "plot", *files, "--out", "x.pdf") == "expected --out to end in .svg or .png, but got 'x.pdf'"
    nowhere = str(tmp_path / "none" / "x.svg")
    assert error(capsys, "plot", *files, "--out", nowhere).startswith(f"expected to write {nowhere!r}, but got: ")
    assert error(capsys, "merge", *files, "--out", nowhere).startswith(f"expected to write {nowhere!r}, but got: ")


@pytest.mark.parametrize(("action", "package", "extra"), [("plot", "matplotlib", "trace"), ("view", "rich", "cli")])
def test_a_missing_package_is_named(files: list[str], tmp_path: Path, action: str, package: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from hpcompat.cli import main; "
        f"sys.exit(main(['trace', {action!r}, {files[0]!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert f"the package {package!r}, which is not installed; install it with: pip install 'hpcompat[{extra}]'" in (
        done.stderr
    )


# The numbers


def made(*spans: tuple[str, str, str, int, int], tick: int = 1) -> trace_file.RankTrace:
    """A trace of 100 ticks of so many nanoseconds with the spans ``(lane, name, unit, start, end)``."""
    return trace_file.RankTrace(
        rank=0,
        world_size=2,
        backend="numpy",
        has_streams=False,
        units=("", "a", "a.b"),
        spans=tuple(Span(*kind, 0, start * tick, end * tick, num_bytes=8) for *kind, start, end in spans),
        start_ns=0,
        end_ns=100 * tick,
    )


TIMELINE = """
               |0 ms                    |50 ms
(root) compute ██                              ██▓▓▓▓▓▓▓
       comm                                            ▄▄░░■■■■▀▀
a      compute   ██████████████░░░░░░██████████
       comm      ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄·
       memory                     ───────────────────────────
a.b    compute
"""


def test_the_timeline_shows_what_filled_most_of_each_column() -> None:
    trace = made(
        ("compute", "forward", "", 0, 68),
        ("compute", "forward", "a", 4, 64),
        ("gather", "all-gather", "a", 4, 44),
        ("blocked", "wait all-gather", "a", 32, 44),
        ("gather", "copy", "a", 44, 45),
        ("memory", "unsharded", "a", 38, 92),
        ("compute", "backward", "", 68, 82),
        ("gather", "all-gather", "", 80, 84),
        ("blocked", "issue reduce-scatter", "", 84, 88),
        ("all-reduce", "all-reduce", "", 88, 96),
        ("reduce", "reduce-scatter", "", 95, 100),
        tick=1_000_000,
    )
    console = Console(width=66, file=io.StringIO(), record=True)
    trace_view.print_traces([trace], console=console)
    printed = [line.rstrip() for line in console.export_text().splitlines()]
    begin = next(index for index, line in enumerate(printed) if "|0 ms" in line)
    assert printed[begin : begin + 7] == TIMELINE.strip("\n").splitlines()


def test_a_window_holds_what_lies_in_it() -> None:
    trace = made(
        ("compute", "forward", "a", 0, 30), ("gather", "all-gather", "a", 20, 50), ("reduce", "x", "a", 60, 70)
    )
    clipped = trace_file.clip(trace, start_ns=25, end_ns=55)
    assert [(span.name, span.start_ns, span.end_ns) for span in clipped.spans] == [
        ("forward", 25, 30),
        ("all-gather", 25, 50),
    ]
    assert (clipped.start_ns, clipped.end_ns) == (25, 55)


@pytest.mark.parametrize(
    ("duration", "ticks", "step"), [(100, 5, 20), (101, 5, 50), (999, 1, 1000), (3, 10, 1), (25_000_000, 5, 5_000_000)]
)
def test_ticks_are_at_round_times(duration: int, ticks: int, step: int) -> None:
    assert trace_view.nice_step(duration, max_ticks=ticks) == step


def test_time_belongs_to_the_innermost_unit() -> None:
    trace = made(
        ("compute", "forward", "", 0, 60),
        ("compute", "forward", "a", 10, 50),
        ("compute", "forward", "a.b", 20, 30),
        ("blocked", "wait all-gather", "a.b", 20, 25),
        ("compute", "backward", "a", 60, 80),
        ("compute", "backward", "", 65, 90),  # began later, but is the outer one
        ("blocked", "finish reduce-scatter", "a", 95, 99),
    )
    found = defaultdict(int)
    for segment in trace_summary.own_segments(trace):
        found[segment.unit, segment.kind] += segment.end_ns - segment.start_ns
    assert found == {
        ("", "forward"): 20,
        ("a", "forward"): 30,
        ("a.b", "forward"): 5,
        ("a.b", "blocked"): 5,
        ("a", "backward"): 20,
        ("", "backward"): 10,
    }


def test_what_overlaps_counts_once() -> None:
    trace = made(
        ("gather", "all-gather", "a", 0, 40),
        ("gather", "all-gather", "", 30, 50),
        ("reduce", "reduce-scatter", "a", 45, 65),
        ("blocked", "issue all-gather", "a", 0, 5),
        ("blocked", "wait all-gather", "a", 35, 40),
        ("blocked", "wait all-gather", "", 48, 50),
        ("blocked", "finish reduce-scatter", "a", 60, 65),
        ("blocked", "wait all-gather", "a", 92, 95),  # for one that began before the recording
        ("memory", "unsharded", "a", 40, 70),
        ("memory", "unsharded", "", 50, 90),
        ("gather", "copy", "a.b", 70, 99),
        ("blocked", "wait copy", "a.b", 70, 99),
    )
    by_unit, total = trace_summary.summaries(trace)
    assert (total.num_gathers, total.gathering, total.num_reductions, total.reducing) == (2, 50, 1, 20)
    assert (total.communicating, total.exposed, total.waiting, total.unsharded) == (65, 17, 10, 50)
    assert total.overlap == 1 - 17 / 65
    assert (by_unit["a"].communicating, by_unit["a"].exposed, by_unit["a"].waiting) == (60, 15, 8)
    assert by_unit["a.b"].overlap is None
    assert trace_summary.peak_unsharded_bytes(trace) == 16
    assert trace_summary.unsharded_steps(trace) == [(40, 8), (50, 16), (70, 8), (90, 0)]
