"""What the tests of programs share."""

import shutil
from pathlib import Path

import pytest
from failing_chains import MODULE
from few import write_few
from odd_chains import CHAINS, ODD
from searched import RANDOM, scores

SEARCH = Path(__file__).parents[2] / "scripts" / "search.py"


@pytest.fixture
def few(tmp_path):
    """A data file of 20 rows, 3 features and 3 classes."""
    write_few(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    """With the chains that fail, for train-gorila and train-apex to learn in."""
    (tmp_path / "mychains.py").write_text(MODULE)
    (tmp_path / "apexchains.py").write_text(CHAINS + ODD)
    return tmp_path


@pytest.fixture
def interfere(tmp_path):
    """A function: write a program as `script` that runs `code` on one rank, or each (None), after one step.
    out: of the runs whose folder has this in its name. before: what it does at first."""

    def write(step, rank, code, script="train_allreduce", out="", before=""):
        here = "True" if rank is None else f"training.MPI.COMM_WORLD.rank == {rank}"
        program = tmp_path / "interfere.py"
        program.write_text(
            "import os, sys\n"
            "from hpcdl.launch import isolated_run, training\n"
            "from hpcdl.runs import run\n"
            f"from hpcdl.scripts import {script}\n"
            f"{before}\n"
            "def record(self, loss, batch, original=run.Run.record):\n"
            "    original(self, loss, batch)\n"
            f"    first = {here} and not training.is_new() and {out!r} in self.options.out\n"
            f"    if self.step == {step} and first: {code}\n"
            "run.Run.record = record\n"
            f"{script}.main(sys.argv[1:])\n"
        )
        return program

    return write


@pytest.fixture
def search(run_on, few):
    """A function: search on so many ranks, in a folder with few.h5."""

    def run(ranks, *arguments, check=None):
        return run_on(ranks, SEARCH, *arguments, check=check, cwd=few)

    return run


@pytest.fixture(scope="session")
def known_search():
    """What is found only once."""
    return {}


@pytest.fixture
def undisturbed(search, few, known_search):
    """What RANDOM brings on one rank."""
    if not known_search:
        search(1, *RANDOM, "--out", "whole", check=0)
        known_search |= scores(few / "whole")
        shutil.rmtree(few / "whole")
    return known_search
