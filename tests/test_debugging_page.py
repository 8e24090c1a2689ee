"""docs/debugging.md as printed: ranks that differ, hang, are killed and drift are named."""

import shutil
from pathlib import Path

import pytest
from printed import as_printed, commands, shell

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "debugging.md").read_text()
EXAMPLES = "who_calls_what.py", "faulty.py", "drifting.py", "cost_of_checking.py"


@pytest.mark.long
def test_the_page_as_printed(environment, tmp_path):
    for name in EXAMPLES:
        shutil.copy(DOCS / "examples" / name, tmp_path)
    shown = commands(PAGE)
    assert len(shown) == 6 and all(f"](examples/{name})" in PAGE for name in EXAMPLES[:-1])
    as_printed(shown, tmp_path, environment)
    done = shell("mpiexec -n 2 python cost_of_checking.py 1", tmp_path, environment)
    assert done.returncode == 0 and done.stdout.count("compared") == 2
    done = shell("mpiexec -n 3 python who_calls_what.py nothing", tmp_path, environment | {"HPCDL_CHECK": "1"})
    assert (done.returncode, done.stdout) == (0, "five steps\n")
