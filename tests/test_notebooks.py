"""docs/notebooks/: each script prints what stands below its cells."""

import subprocess
import sys
from pathlib import Path

import pytest
from printed import assert_said

ROOT = Path(__file__).parents[1]
LONG = {"one_question"}
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in LONG))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.py"))
]
PRINTED = "# > "


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_as_printed(path, environment, tmp_path):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    printed = [line[len(PRINTED) :] for line in path.read_text().splitlines() if line.startswith(PRINTED)]
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([sys.executable, path], check=False, **how)
    assert done.returncode == 0, done.stderr
    assert len(printed) >= 3
    assert_said(done, printed)
