"""A run that ends at its last whole step, though the one under way was given up when a signal came."""

from typing import TYPE_CHECKING

from hpcdl.runs.boundary_actions import Due, evaluate_and_save

if TYPE_CHECKING:
    from hpcdl.runs.run import Run


def end_here(run: "Run") -> None:
    """Agree on the steps that are done, and save; where one rank alone makes a run, which needs to ask no other."""
    with run.stopwatch.apart():
        if run.agreement.steps_done:
            run._agree()
        run.stopping.told(run.step, True, False)
        evaluate_and_save(run, Due(False, False, False))
