"""Where a run is: one record, which is replaced whole, and comes back from a checkpoint as it was."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.runs import Options, Run
from hpcdl.runs.progress import Progress


@pytest.mark.parametrize("best", [math.inf, 0.25])
def test_it_comes_back_from_a_checkpoint(best):
    there = Progress(7, 91, 6, {"test_loss": 0.5}, 0.75, best, 2, None, 1.5)
    assert Progress.read(there.attributes() | {"strategy": "all_reduce"}) == there
    assert Progress.read(Progress().attributes()) == Progress()


def test_nobody_changes_it():
    with pytest.raises(FrozenInstanceError):
        Progress().step = 3


def test_a_step_changes_steps_and_examples_alone():
    there = Progress(7, 91, 6, {"test_loss": 0.5}, 0.75, 0.25, 2, "signal", 1.5)
    assert there.after_step(13) == replace(there, step=8, examples=104)


def test_the_first_reason_for_which_a_run_stops_counts():
    run = Run(Communicator(MPI.COMM_SELF), Options(progress="none"))
    before = run.progress
    run.stop(None)
    assert run.stopped is None
    run.stop("signal")
    run.stop("patience")
    assert (run.stopped, before.stopped, run.over) == ("signal", None, True)
    run.stop("finished", known=True)  # as the rank that leads has said
    assert run.stopped == "finished"
    run.bookkeeping.free()
