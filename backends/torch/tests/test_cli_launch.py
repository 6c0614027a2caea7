"""`hpcompat launch` with the real torchrun behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import hpcompat

hpcompat.init_process_group(device="cpu")
total = torch.ones(1)
dist.all_reduce(total)
line = f"{int(total)} {os.environ['HPCOMPAT_BACKEND']} {os.environ['OMP_NUM_THREADS']} {sys.argv[2:]}"
Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(line)
hpcompat.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 1])
def test_ranks_find_each_other_and_a_failure_is_reported(tmp_path: Path, status: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", "2", "--backend", "torch"]
    command = [*launch, str(script), str(tmp_path), str(status)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    written = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    expected = f"2 torch 1 ['{status}']"
    assert written == {"rank0": expected, "rank1": expected}, result.stderr
    assert result.returncode == status, result.stderr
