"""``hpcompat info``: what is installed here and what each backend found it can do."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpcompat import registry

if TYPE_CHECKING:
    from rich.table import Table

ENVIRONMENT = (registry.ENV_VAR, "OMP_NUM_THREADS", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hpcompat info``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the report; the status is 1 when a backend whose framework is installed cannot be used."""
    report = collect()
    if args.json:
        # `default`: a backend may describe a device or a dtype by the framework's own object.
        print(json.dumps(report, indent=2, default=str))
    else:
        _print_tables(report)
    backends = report["backends"]
    assert isinstance(backends, dict)
    return int(any(entry["framework_installed"] and "error" in entry for entry in backends.values()))


def collect() -> dict[str, object]:
    """The report as plain data; imports the frameworks that are installed, to probe them."""
    return {
        "hpcompat": importlib.metadata.version("hpcompat"),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "backends": {name: _probe(name) for name in registry.available_backends()},
    }


def _probe(name: str) -> dict[str, object]:
    if not registry.framework_installed(name):
        return {"framework_installed": False, "error": f"{name} is not installed: pip install 'hpcompat[{name}]'"}
    try:
        return {"framework_installed": True, **registry.get_backend(name).probe()}
    except Exception as error:
        # This command is where a user looks when a backend is broken, in whatever way it is.
        return {"framework_installed": True, "error": f"{type(error).__name__}: {error}"}


def _print_tables(report: Mapping[str, object]) -> None:
    from rich.console import Console

    console = Console()
    backends = report["backends"]
    assert isinstance(backends, dict)
    console.print(_table("hpcompat", {key: value for key, value in report.items() if key != "backends"}))
    for name, entry in backends.items():
        console.print(_table(f"backend {name}", entry))
    if not backends:
        console.print("No backend is declared: reinstall hpcompat.")


def _table(title: str, entries: Mapping[str, object]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _flatten(entries):
        # Text, not str: rich would read a device such as "[cuda:0]" as markup.
        table.add_row(key, Text(value))
    return table


def _flatten(entries: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in entries.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}: ")
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, str(value)
