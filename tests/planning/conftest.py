"""What a forecast says beside what a run has held."""

import json
from pathlib import Path

import numpy as np
import pytest

from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_npz import prepare_npz

SCRIPTS = Path(__file__).parents[2] / "scripts"
BOUNDS = {"parameters": 0.03, "gradients": 0.03, "optimizer": 0.03, "activations": 0.10}


@pytest.fixture
def rows_file(tmp_path):
    """A function: the path of a data file of 101 rows with 5 features, of two classes, or of values."""

    def make(classes=2):
        random = np.random.default_rng(0)
        y = random.integers(0, classes, 101) if classes else random.standard_normal(101)
        np.savez(tmp_path / "rows.npz", x=random.standard_normal((101, 5)), y=y)
        prepare_npz(str(tmp_path / "rows.npz"), Output(str(tmp_path / "rows.h5")))
        return str(tmp_path / "rows.h5")

    return make


@pytest.fixture
def compared(run_on, tmp_path):
    """A function: run a program, and return its workload, its memory beside the forecast, and its summary."""
    from hpcdl.planning.memory_report import compare_run

    def run(ranks, program, *options):
        script = SCRIPTS / f"{program.replace('-', '_')}.py"
        run_on(ranks, script, *options, "--out", "run", "--force", "--progress", "none", check=0)
        found = compare_run(tmp_path / "run", trust=[str(tmp_path)])  # the test wrote what is its own
        return *found, json.loads((tmp_path / "run/summary.json").read_text())

    return run


@pytest.fixture
def foretold(compared):
    """A function: run a program for a few steps, and hold what it has measured beside the forecast from its options.
    at_most: activations depend on who comes first, and are foretold at their most. late: bytes of parameters that a
    rank may hold besides, until it sees that their message has left."""

    def check(ranks, program, *options, at_most=False, late=0):
        case, found, _ = compared(ranks, program, *options)
        assert case.program == program and {each.rank for each in found} == set(range(ranks))
        loose = [each.kind == "activations" and at_most and each.error > 0 for each in found]
        sure = [each for each, any_error in zip(found, loose, strict=True) if not any_error]
        wrong = [each for each in sure if abs(each.error) > BOUNDS[each.kind]]
        wrong = [each for each in wrong if (each.kind, each.measured - each.forecast) != ("parameters", late)]
        assert not wrong, wrong
        assert any(each.measured for each in found if each.kind == "parameters")

    return check
