"""What the benchmark found, as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MEGA = 1 << 20
BUSY = 1.1
LEGEND = (
    "Medians over the timed steps. MPI: in MPI calls, waiting for other ranks included; raw MPI: the same calls again "
    "without MindSpore; additions: of gradients, on the host, part of our own code. Our own code: (sharded - MPI - "
    "bare) / units, with a 90 % bootstrap interval; host only: the same with MPI calls that return at once; CPU: the "
    "same of the stepping thread's CPU time, in the cheapest step."
)


def print_report(console: Console, result: dict[str, Any]) -> None:
    """All tables that the result has rows for."""
    console.print(_times(result))
    console.print(_overheads(result))
    console.print(LEGEND)
    loads = (result["machine"][key][0] for key in ("load_average", "load_average_after"))
    console.print("Load average over a minute: {:.2f} before, {:.2f} after.".format(*loads))
    busiest = max(row["bare_ms"] / row["cpu"]["bare_process_ms"] for row in result["cases"].values())
    if busiest > BUSY:
        console.print(
            f"[bold]The machine was busy[/bold]: the bare model took {busiest:.2f} times its CPU time, so that times "
            "on the clock say little; compare CPU time, or run again when nothing else runs."
        )
    if any("peak_whole_bytes" in row for row in result["cases"].values()):
        console.print(_memory(result))
    for name, row in result["cases"].items():
        if "profile" in row:
            console.print(_profile(name, row["profile"]))


def _times(result: dict[str, Any]) -> Table:
    settings, machine, versions = result["settings"], result["machine"], result["versions"]
    table = Table(
        title=f"ms per step: sharded MindSpore {versions['mindspore']}, {settings['num_ranks']} ranks of "
        f"{settings['num_threads']} thread(s), {machine['num_cores']} cores"
    )
    for heading in ("case", "units", "sharded", "bare", "sharded / bare", "MPI", "share", "raw MPI", "additions"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for name, row in result["cases"].items():
        table.add_row(
            name,
            str(row["num_units"]),
            *(f"{row[key]:.2f}" for key in ("sharded_ms", "bare_ms")),
            f"{row['sharded_ms'] / row['bare_ms']:.3f}",
            f"{row['mpi_ms']:.2f}",
            f"{row['mpi_share']:.1%}",
            *(f"{row[key]:.2f}" for key in ("raw_ms", "additions_ms")),
        )
    return table


def _overheads(result: dict[str, Any]) -> Table:
    table = Table(title="Our own code: ms per unit and step")
    for heading in ("case", "in step", "90 %", "host only", "90 %", "CPU", "host only, CPU"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for name, row in result["cases"].items():
        cells = []
        for kind in ("overhead", "host_overhead"):
            low, high = row[f"{kind}_interval"]
            cells += [f"{row[f'{kind}_ms_per_unit']:.3f}", f"{low:.3f} to {high:.3f}"]
        cells += [f"{row['cpu'][f'{kind}_ms_per_unit']:.3f}" for kind in ("overhead", "host_overhead")]
        table.add_row(name, *cells)
    return table


def _memory(result: dict[str, Any]) -> Table:
    table = Table(title="Bytes of whole parameters (MiB)")
    headings = ("case", "all parameters", "largest unit", "peak of a step", "peak / all", "after a step")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for name, row in result["cases"].items():
        table.add_row(
            name,
            *(f"{row[key] / MEGA:.3f}" for key in ("parameter_bytes", "largest_unit_bytes", "peak_whole_bytes")),
            f"{row['peak_whole_bytes'] / row['parameter_bytes']:.3f}",
            f"{row['whole_bytes_after_step'] / MEGA:.3f}",
        )
    return table


def _profile(name: str, profile: dict[str, Any]) -> Table:
    table = Table(title=f"{name}: us per unit and step without communication ({profile['num_units']} units)")
    for heading in ("where", "us", "CPU", "calls"):
        table.add_column(heading, justify="left" if heading == "where" else "right")
    for kind, spent in profile["kinds"].items():
        table.add_row(kind, f"{spent['us']:.1f}", f"{spent['cpu_us']:.1f}", f"{spent['calls']:.1f}")
    table.add_section()
    for label, key in (("rest", "rest"), ("step - bare", "added")):
        table.add_row(label, f"{profile[key]['us']:.1f}", f"{profile[key]['cpu_us']:.1f}", "")
    if profile["missing"]:
        table.caption = "not found, so counted in the rest: " + ", ".join(profile["missing"])
    return table
