"""What a forecast says beside what a run has held."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
BOUNDS = {"parameters": 0.03, "gradients": 0.03, "optimizer": 0.03, "activations": 0.10}


@pytest.fixture
def foretold(run_on, tmp_path):
    """A function: run a program for a few steps, and hold what it has measured beside the forecast from its options.

    at_most: activations depend on who comes first, and are foretold at their most. late: bytes of parameters that the
    first rank may hold besides, until it sees that their message has left.
    """
    from hpcdl.planning.memory_report import compare_run

    def check(ranks, program, *options, at_most=False, late=0):
        script = SCRIPTS / f"{program.replace('-', '_')}.py"
        run_on(ranks, script, *options, "--out", "run", "--force", "--progress", "none", check=0)
        case, found = compare_run(tmp_path / "run", trust=[str(tmp_path)])  # the test wrote the module
        assert case.program == program and {each.rank for each in found} == set(range(ranks))
        loose = [each.kind == "activations" and at_most and each.error > 0 for each in found]
        sure = [each for each, any_error in zip(found, loose, strict=True) if not any_error]
        wrong = [each for each in sure if abs(each.error) > BOUNDS[each.kind]]
        wrong = [
            each for each in wrong if (each.kind, each.rank, each.measured - each.forecast) != ("parameters", 0, late)
        ]
        assert not wrong, wrong
        assert any(each.measured for each in found if each.kind == "parameters")

    return check
