"""What the tests of ranks that outlive others share: options, how a rank is killed, and what is left behind."""

import signal

import pytest
import written_runs
from smaller_world import World

from hpcdl.data import open_data
from hpcdl.machine.world import OPEN_MPI, library
from hpcdl.models import for_data
from hpcdl.optim import make_optimizer
from hpcdl.runs.options import Options

DIGITS = ["--data", "digits", "--model", "mlp:16", "--dtype", "float64"]
SGD = [*DIGITS, "--batch-size", "64", "--epochs", "2"]
STEPS, EPOCH = 46, 23
ROUNDS = [*DIGITS, "--clients", "20", "--rounds", "6", "--local-epochs", "1", "--late", "0.2"]
KILL = f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
ULFM = ["--with-ft", "ulfm"]
with_ulfm = pytest.mark.skipif(library() != OPEN_MPI, reason="Open MPI hands failures to the program; MPICH does not")


def world(kind: type[World], size: int, **settings) -> World:
    """The same in one process."""
    options = Options(batch_size=64, epochs=2, dtype="float64", model="mlp:16")
    data = open_data("digits", dtype="float64")
    model = for_data(options.model, data, options.dtype)
    if "outer" in settings:
        settings["outer"] = make_optimizer(settings["outer"], model.layout.size, "float64", lambda _: 0.7)
    return kind(size, model, data, lambda: options.make_optimizer(model, 1, data), 64, **settings)


def evaluations(folder):
    """The losses of the test part by step; checked: that each step and each evaluation has one line."""
    losses(folder)
    scored = [(line["step"], line["test_loss"]) for line in written_runs.evaluations(folder)]
    assert len(scored) == len(dict(scored))
    return dict(scored)


def losses(folder):
    """The losses of training by step; checked: that each step has one line."""
    found = [(line["step"], line["train_loss"]) for line in written_runs.steps(folder)]
    assert [step for step, _ in found] == [*range(1, written_runs.summary(folder)["steps"] + 1)]
    return dict(found)
