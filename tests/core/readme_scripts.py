"""The scripts of the README, to be run as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
HANG_SECONDS = 300


def script_after(heading: str) -> str:
    """The first Python block below a heading of the README."""
    section = README.read_text().split(f"\n{heading}\n", 1)[1]
    found = re.search(r"^```python\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"no Python block below {heading}"
    return found[1]


def losses_of(heading: str, *, backend: str, folder: Path) -> list[float]:
    """Run the script on two ranks; the losses that one of them printed."""
    script = folder / "train.py"
    script.write_text(script_after(heading))
    done = subprocess.run(
        [sys.executable, "-m", "hpcompat.cli", "launch", "-n", "2", "--backend", backend, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [float(number) for number in re.findall(r"^\d+ (\d\.\d+(?:e-\d+)?)$", done.stdout, flags=re.MULTILINE)]
