"""FSDP2 scripts as they are: only the import line changes, and the last line of output stays the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forked_ranks

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).parent / "scripts"
NATIVE_IMPORT = re.compile(r"^from torch\.distributed\.fsdp import ", flags=re.MULTILINE)


def output_of(script: Path, *, folder: Path) -> dict[str, str]:
    """What rank 0 of two printed: the first word of a line -> the rest."""
    done = forked_ranks.run(script, num_ranks=2, folder=folder)
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("MODEL ", "RESULT ")))


@pytest.mark.parametrize("name", ["tutorial_style", "titan_style", "dcp_style"])
def test_same_result_with_only_the_import_changed(name: str, tmp_path: Path) -> None:
    source = (SCRIPTS / f"{name}.py").read_text()
    changed, num_changes = NATIVE_IMPORT.subn("from hpcompat import ", source)
    assert num_changes == 1
    assert "torch.distributed.fsdp" not in changed
    changed_script = tmp_path / f"{name}.py"
    changed_script.write_text(changed)

    native = output_of(SCRIPTS / f"{name}.py", folder=tmp_path)
    ours = output_of(changed_script, folder=tmp_path)

    # The name is the same; that the two runs used different implementations is seen at where the class comes from.
    assert native["MODEL"].startswith("torch.distributed.fsdp.")
    assert ours["MODEL"].startswith("hpcompat.")
    assert ours["RESULT"] == native["RESULT"]
