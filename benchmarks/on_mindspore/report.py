"""What the benchmark found, as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MEGA = 1 << 20
BUSY = 1.1
LEGEND = (
    "ms, medians over the timed steps. MPI: in MPI calls, waiting for other ranks included; raw MPI: the same calls "
    "again without MindSpore; additions: of gradients, on the host. overhead: (sharded - MPI - bare) / units, with a "
    "90 % bootstrap interval; host: the same with MPI calls that return at once; CPU: the same of the CPU time of the "
    "stepping thread in the cheapest step."
)


def print_report(console: Console, result: dict[str, Any]) -> None:
    """All tables that the result has rows for."""
    console.print(_times(result))
    console.print(LEGEND)
    busiest = max(row["bare_ms"] / row["cpu"]["bare_ms"] for row in result["cases"].values())
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
        title=f"sharded MindSpore {versions['mindspore']}, {settings['num_ranks']} ranks of {settings['num_threads']} "
        f"thread(s), {machine['num_cores']} cores: ms per step",
        caption="overhead in ms per unit and step",
    )
    headings = ("case", "units", "sharded", "bare", "MPI", "share", "raw MPI", "additions")
    for heading in (*headings, "overhead", "90 %", "host", "CPU", "host CPU"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for name, row in result["cases"].items():
        low, high = row["overhead_interval"]
        table.add_row(
            name,
            str(row["num_units"]),
            *(f"{row[key]:.2f}" for key in ("sharded_ms", "bare_ms", "mpi_ms")),
            f"{row['mpi_share']:.0%}",
            *(f"{row[key]:.2f}" for key in ("raw_ms", "additions_ms")),
            f"{row['overhead_ms_per_unit']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['host_overhead_ms_per_unit']:.3f}",
            *(f"{row['cpu'][key]:.3f}" for key in ("overhead_ms_per_unit", "host_overhead_ms_per_unit")),
        )
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
