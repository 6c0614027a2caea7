"""What the benchmark found, as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MEGA = 1 << 20
BUSY = 1.1
LEGEND = (
    "ms, medians over the timed steps; added: step - bare, what sharding adds to the bare model. ratio: ours / native, "
    "of added time where collectives are no-ops (*), of step time elsewhere, with a 90 % bootstrap interval. "
    "CPU ratio: the same of the stepping thread's CPU time in the cheapest step."
)
OPTIMIZER_LEGEND = (
    "ms, medians over the timed steps, a step's time being the slowest rank's, with 90 % bootstrap intervals of the "
    "ratios over the repeats; CPU: of the stepping thread, in a repeat's cheapest step. Differing: elements of "
    "parameters and states."
)


def print_report(console: Console, result: dict[str, Any]) -> None:
    """All tables that the result has rows for."""
    console.print(_times(result))
    console.print(LEGEND)
    busiest = max(row["bare_ms"] / row["cpu_ms"]["bare"] for row in result["cases"].values())
    if result["settings"]["device"] == "cpu":
        _say_if_busy(console, busiest, what="the bare model")
    if "growth" in result:
        growth = result["growth"]
        console.print(f"tiny96 / tiny24: ours {growth['ours']:.2f}, native {growth['native']:.2f}")
    if "memory" in result:
        console.print(_memory(result["memory"]["peak_bytes"]))
    for name, profile in result.get("profile", {}).items():
        console.print(_profile(name, profile))


def print_optimizer_report(console: Console, result: dict[str, Any]) -> None:
    """Times of the optimizer's step on the three sides, and whether they did the same."""
    settings, machine = result["settings"], result["machine"]
    table = Table(
        title=f"AdamW (foreach) on {result['num_parameters']} shards, {settings['dtype']}, ours ({settings['ours']}), "
        f"torch {result['versions']['torch']}, {settings['num_ranks']} rank(s), {settings['num_threads']} thread(s) "
        f"each, {machine['num_cores']} cores"
    )
    for heading in ("side", "ms", "/ plain", "90 %", "CPU ms", "/ plain", "differing from plain"):
        table.add_column(heading, justify="left" if heading == "side" else "right", no_wrap=True)
    for side in ("plain", "native", "ours"):
        table.add_row(side, *_optimizer_cells(result, side))
    console.print(table)
    low, high = result["ours_over_native_interval"]
    console.print(
        f"ours / plain {result['ours_over_plain']:.3f}, ours / native {result['ours_over_native']:.3f} "
        f"({low:.3f}-{high:.3f}); bits of all sides equal after {result['num_steps']['ours']} steps of each repeat: "
        f"{'yes' if result['bits_equal'] else '[bold]no[/bold]'}, "
        f"{result['num_elements_moved']} of {result['num_elements']} elements moved"
    )
    console.print(OPTIMIZER_LEGEND)
    _say_if_busy(console, result["plain_ms"] / result["cpu_ms"]["plain"], what="a step on plain tensors")


def _optimizer_cells(result: dict[str, Any], side: str) -> tuple[str, ...]:
    milliseconds, cpu = f"{result[f'{side}_ms']:.3f}", f"{result['cpu_ms'][side]:.3f}"
    if side == "plain":
        return milliseconds, "1", "", cpu, "1", ""
    low, high = result[f"{side}_over_plain_interval"]
    num_differing = sum(result["differing_elements"][side].values())
    ratios = f"{result[f'{side}_over_plain']:.3f}", f"{low:.3f}-{high:.3f}"
    return milliseconds, *ratios, cpu, f"{result[f'{side}_over_plain_cpu']:.3f}", str(num_differing)


def _say_if_busy(console: Console, times_cpu_time: float, *, what: str) -> None:
    if times_cpu_time > BUSY:
        console.print(
            f"[bold]The machine was busy[/bold]: {what} took {times_cpu_time:.2f} times its CPU time, so that times "
            "on the clock say little; compare CPU time, or run again when nothing else runs."
        )


def _times(result: dict[str, Any]) -> Table:
    settings, machine = result["settings"], result["machine"]
    title = (
        f"ours ({settings['ours']}) against native FSDP2, torch {result['versions']['torch']}, "
        f"{settings['num_procs']} x {settings['device']}, {settings['num_threads']} thread(s) each, "
        f"{machine['num_cores']} cores, optimizer {settings['optimizer']}"
    )
    table = Table(title=title)
    headings = (
        "case",
        "ours",
        "native",
        "bare",
        "ours added",
        "native added",
        "ratio",
        "90 %",
        "step ratio",
        "CPU ratio",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for name, row in result["cases"].items():
        times = (row[key] for key in ("ours_ms", "native_ms", "bare_ms", "ours_overhead_ms", "native_overhead_ms"))
        low, high = row["ratio_interval"]
        star = "*" if row["ratio_of"] == "overhead" else ""
        table.add_row(
            name,
            *(f"{milliseconds:.2f}" for milliseconds in times),
            f"{row['ratio']:.3f}{star}",
            f"{low:.3f}-{high:.3f}",
            f"{row['ratio_step']:.3f}",
            f"{row['ratio_cpu']:.3f}",
        )
    return table


def _memory(peaks: dict[str, dict[str, dict[str, int]]]) -> Table:
    table = Table(title="Peak bytes allocated in a step, beyond the sharded parameters (MiB)")
    for heading in ("case", "what", "ours", "native", "bare", "ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "what") else "right")
    meaning = {
        "unsharded": "whole parameters and gather buffers",
        "one_token": "the same, gradients and reduction buffers",
        "step": "all, in the timed step",
    }
    for name, quantities in peaks.items():
        for quantity, sides in quantities.items():
            megabytes = (f"{sides[side] / MEGA:.3f}" for side in ("ours", "native", "bare"))
            table.add_row(name, meaning[quantity], *megabytes, f"{sides['ours'] / sides['native']:.3f}")
    return table


def _profile(name: str, profile: dict[str, Any]) -> Table:
    table = Table(title=f"{name}: us per unit and step ({profile['num_units']} units)")
    for heading in ("where", "ours", "CPU", "calls", "native", "CPU", "calls"):
        table.add_column(heading, justify="left" if heading == "where" else "right")
    sides = [profile["ours"], profile["native"]]
    for kind in dict.fromkeys(kind for side in sides for kind in side["kinds"]):
        table.add_row(kind, *(cell for side in sides for cell in _cells(side["kinds"].get(kind), side, kind=kind)))
    table.add_section()
    for label, key in (("rest", "rest"), ("step - bare", "added")):
        table.add_row(label, *(cell for side in sides for cell in _cells(side[key], side)))
    if missing := sorted({target for side in sides for target in side["missing"]}):
        table.caption = "not found, so counted in the rest: " + ", ".join(missing)
    return table


def _cells(row: dict[str, float] | None, side: dict[str, Any], *, kind: str | None = None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    calls = "" if kind is None else f"{side['calls_per_step'][kind]:.0f}"
    return f"{row['us']:.1f}", f"{row['cpu_us']:.1f}", calls
