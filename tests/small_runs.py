"""Fixtures: small data, and small runs by all-reduce; for the tests of runs, of their checkpoints and their faults."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.runs import Options, Run
from hpcdl.runs.accumulated import accumulated
from hpcdl.strategies import all_reduce


@pytest.fixture
def data():
    """Examples of 3 classes that overlap a little, 28 to train, 7 to validate, 30 to test; float64."""
    random = np.random.default_rng(9)
    y = random.integers(0, 3, 65)
    x = random.standard_normal((65, 4)) + 2 * np.eye(3, 4)[y]
    return from_arrays(x[:35], y[:35], x[35:], y[35:], dtype="float64", validation=0.2)


@pytest.fixture
def run(world, data):
    """A function: train with these options on all ranks, by all-reduce unless told; returns the run after its end. All
    ranks of `comm` begin together, and end together unless it raises: what one has written others may read."""

    def start(own=None, comm=world, train=all_reduce.train, compress=None, observer=None, **options):
        defaults = {"batch_size": 7, "epochs": 5, "dtype": "float64", "progress": "none", "model": "mlp:6"}
        defaults["schedule"] = "constant"  # cosine depends on the number of steps, which tests of resumption change
        options = Options(**defaults | options)
        comm.Barrier()
        wrapped = Communicator(comm, options.allreduce, trace=options.trace)
        made = own or make_model(options.model, data.features, data.classes, options.dtype)
        made = accumulated(made, options.accumulate)
        with Run(wrapped, options) as running:
            if observer is not None:
                running.observe(observer)
            train(wrapped, made, data, running.make_optimizer(made, data), running, *([compress] if compress else []))
        comm.Barrier()
        return running

    return start
