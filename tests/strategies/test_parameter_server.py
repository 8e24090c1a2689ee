"""Parameter servers take the very steps of all-reduce SGD where they must, and stay within their bounds elsewhere."""


import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.services.consistency import Consistency
from hpcdl.strategies import parameter_server, sequential

OPTIMIZERS = ["sgd", "momentum", "nesterov", "adam", "adamw"]
ASYNC, SSP0 = Consistency("async"), Consistency("ssp", 0)
STEPS = 4 * 3


def agree(path, reference, tolerance=1e-10):
    assert len(path) == len(reference) > 0
    for step, (mine, wanted) in enumerate(zip(path, reference, strict=True)):
        scale = max(1, np.abs(wanted).max())
        assert np.abs(mine - wanted).max() <= tolerance * scale, f"step {step}"


def placements(size):
    """How so many ranks may be divided: with 1, 2 and 3 servers, and with every rank a worker and a server."""
    return [{"servers": servers} for servers in (1, 2, 3) if servers < size] + [{"on_workers": True}]


@pytest.fixture
def serve(follow):
    """A function: `follow` with parameter servers; own arguments and options as keywords."""

    def run(comm, own, **options):
        workers = comm.size if own.get("on_workers") else comm.size - own.get("servers", 1)
        return follow(comm, parameter_server.train, own=own, workers=workers, **options)

    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bsp_is_sequential_step_by_step_for_any_number_of_servers(optimizer, serve, follow, each_group):
    reference = follow(MPI.COMM_SELF, sequential.train, optimizer=optimizer)

    def body(comm):
        for own in placements(comm.size):
            run = serve(comm, own, optimizer=optimizer)
            assert run.extra.get("staleness_histogram") == ([STEPS * run.workers] if comm.rank == 0 else None)
            if comm.rank == 0:
                agree(run.path, reference.path)

    each_group(body)
