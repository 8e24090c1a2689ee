"""The table of refusals: one line on rank 0, status 2, nothing written, no hang."""

import importlib.util
import re
from pathlib import Path

import pytest
from in_process import ends
from mpi4py import MPI
from refusals import cases
from refused_folder import write_folder

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts ranks of its own")
SCRIPTS = Path(__file__).parents[2] / "scripts"
CASES = [*cases()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("refused")
    write_folder(path)
    return path


def there(folder):
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("program", "ranks", "given", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_refused(folder, run_on, monkeypatch, program, ranks, given, words):
    if "torch:" in " ".join(given) and not importlib.util.find_spec("torch"):
        pytest.skip("a module of PyTorch's")
    monkeypatch.chdir(folder)
    before = there(folder)
    if ranks == 1:
        status, said = ends(program, given)
    else:
        done = run_on(ranks, SCRIPTS / f"{program}.py", *given, cwd=folder)
        status, said = done.returncode, done.stdout + done.stderr
    ours = [line for line in said.splitlines() if ": error: " in line]  # Open MPI's launcher adds lines of its own
    assert status == 2 and len(ours) == 1 and "Traceback" not in said, said
    assert re.match(f"{program.replace('_', '[-_]')}: error: {words}", ours[0]), said
    assert there(folder) == before
